package staged_test

import (
	goruntime "runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/internal/logtest"
)

// TestLeak: a staged communicator that is forgotten is found, with its base.
func TestLeak(t *testing.T) {
	logged := logtest.Capture(t)
	forget(t)
	require.Eventually(t, func() bool {
		goruntime.GC()
		return len(logged.Lines("never closed")) > 1
	}, time.Minute, time.Millisecond)
	assert.Len(t, logged.Lines(`backend=staged count=1 first="rank 0 of 1, made at `), 1)
	assert.Len(t, logged.Lines(`backend=local count=1 first="rank 0 of 1, made at `), 1)
}

func forget(t *testing.T) {
	world, err := local.New(1)
	require.NoError(t, err)
	c, err := staged.New(world[0], apart{hosttest.NewRuntime(t)}, hosttest.NewRuntime(t))
	require.NoError(t, err)
	require.NoError(t, c.Barrier(t.Context()))
}

// TestLeakOfASubCommunicator: a staged sub-communicator that is forgotten is found while its parent is in use.
func TestLeakOfASubCommunicator(t *testing.T) {
	logged := logtest.Capture(t)
	world, err := local.New(1)
	require.NoError(t, err)
	c, err := staged.New(world[0], apart{hosttest.NewRuntime(t)}, hosttest.NewRuntime(t))
	require.NoError(t, err)
	func() {
		_, err := c.Split(t.Context(), 0, 0)
		require.NoError(t, err)
	}()
	require.Eventually(t, func() bool {
		goruntime.GC()
		return len(logged.Lines("never closed")) > 0
	}, time.Minute, time.Millisecond)
	require.NoError(t, c.Barrier(t.Context()))
	require.NoError(t, c.Close())
}

package staged_test

import (
	"bytes"
	"log/slog"
	goruntime "runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/staged"
)

// TestLeak: a staged communicator that is forgotten takes its base along, which says so.
func TestLeak(t *testing.T) {
	var text bytes.Buffer // a handler writes one line at a time
	logged := make(chan string, 10)
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(writer(func(p []byte) { logged <- string(p) }), nil)))
	defer slog.SetDefault(before)
	forget(t)
	require.Eventually(t, func() bool {
		goruntime.GC()
		for len(logged) > 0 {
			text.WriteString(<-logged)
		}
		return strings.Contains(text.String(), "never closed")
	}, 10*time.Second, time.Millisecond)
	assert.Contains(t, text.String(), "backend=local rank=0 ranks=1")
}

func forget(t *testing.T) {
	world, err := local.New(1)
	require.NoError(t, err)
	c, err := staged.New(world[0], apart{hosttest.NewRuntime(t)}, hosttest.NewRuntime(t))
	require.NoError(t, err)
	require.NoError(t, c.Barrier(t.Context()))
}

// writer is a function that takes what is written.
type writer func(p []byte)

func (w writer) Write(p []byte) (int, error) {
	w(p)
	return len(p), nil
}

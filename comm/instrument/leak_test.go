package instrument_test

import (
	goruntime "runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A communicator that is forgotten is found behind each decorator, also one that waits for signals.
func TestForgottenDecorators(t *testing.T) {
	rt := cpu.New()
	t.Setenv("TUTTI_RECORD", "10")
	t.Setenv("TUTTI_CHECK", "1")
	for name, decorate := range decorators(t, rt) {
		t.Run(name, func(t *testing.T) {
			logged := logtest.Capture(t)
			forget(t, decorate)
			awaitFound(t, logged)
		})
	}
}

// A sub-communicator that is forgotten is found while its parent is in use.
func TestForgottenSubCommunicators(t *testing.T) {
	rt := cpu.New()
	t.Setenv("TUTTI_RECORD", "10")
	t.Setenv("TUTTI_CHECK", "1")
	for name, decorate := range decorators(t, rt) {
		t.Run(name, func(t *testing.T) {
			logged := logtest.Capture(t)
			world, err := local.New(1)
			require.NoError(t, err)
			parent, err := decorate(world[0])
			require.NoError(t, err)
			kept := forgetSub(t, parent)
			awaitFound(t, logged)
			require.NoError(t, kept.Barrier(t.Context()), "it is in use, though its parent is forgotten")
			require.NoError(t, parent.Barrier(t.Context()))
			require.NoError(t, comm.CloseAll(parent, nil))
			assert.ErrorIs(t, kept.Barrier(t.Context()), comm.ErrClosed)
		})
	}
}

// decorators decorate a communicator.
func decorators(t *testing.T, rt *cpu.Runtime) map[string]func(c comm.Communicator) (comm.Communicator, error) {
	return map[string]func(c comm.Communicator) (comm.Communicator, error){
		"limited":  func(c comm.Communicator) (comm.Communicator, error) { return comm.Limit(c, time.Hour, nil), nil },
		"metered":  func(c comm.Communicator) (comm.Communicator, error) { return metered.New(c), nil },
		"recorded": func(c comm.Communicator) (comm.Communicator, error) { return record.New(c, 10, ""), nil },
		"checked": func(c comm.Communicator) (comm.Communicator, error) {
			return checked.New(t.Context(), c, rt, time.Hour)
		},
		"all": func(c comm.Communicator) (comm.Communicator, error) {
			t.Chdir(t.TempDir())
			return instrument.Epoch(t.Context(), rt, c, 1, "a")
		},
	}
}

// awaitFound waits until a forgotten communicator is logged.
func awaitFound(t *testing.T, logged *logtest.Log) {
	t.Helper()
	require.Eventually(t, func() bool {
		goruntime.GC()
		return len(logged.Lines("never closed")) > 0
	}, time.Minute, time.Millisecond)
	assert.Regexp(t, `backend=(local|checked) count=\d first="rank 0 of 1, made at `, logged.Lines("never closed")[0])
}

// forget loses a decorated communicator that was used.
func forget(t *testing.T, decorate func(c comm.Communicator) (comm.Communicator, error)) {
	world, err := local.New(1)
	require.NoError(t, err)
	c, err := decorate(world[0])
	require.NoError(t, err)
	require.NoError(t, c.Barrier(t.Context()))
}

// forgetSub loses a sub-communicator, and another one except a sub-communicator of it.
func forgetSub(t *testing.T, parent comm.Communicator) (kept comm.Communicator) {
	lost, err := parent.Split(t.Context(), 0, 0)
	require.NoError(t, err)
	require.NoError(t, lost.Barrier(t.Context()))
	between, err := parent.Split(t.Context(), 0, 0)
	require.NoError(t, err)
	kept, err = between.Split(t.Context(), 0, 0)
	require.NoError(t, err)
	return kept
}

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
	for name, decorate := range map[string]func(c comm.Communicator) (comm.Communicator, error){
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
	} {
		t.Run(name, func(t *testing.T) {
			logged := logtest.Capture(t)
			forget(t, decorate)
			require.Eventually(t, func() bool {
				goruntime.GC()
				return len(logged.Lines("never closed")) > 0
			}, time.Minute, time.Millisecond)
			assert.Regexp(t, `backend=local count=\d first="rank 0 of 1, made at `, logged.Lines("never closed")[0])
		})
	}
}

// forget loses a decorated communicator that was used.
func forget(t *testing.T, decorate func(c comm.Communicator) (comm.Communicator, error)) {
	world, err := local.New(1)
	require.NoError(t, err)
	c, err := decorate(world[0])
	require.NoError(t, err)
	require.NoError(t, c.Barrier(t.Context()))
}

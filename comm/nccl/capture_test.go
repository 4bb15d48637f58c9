package nccl_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/nccl"
)

// A framework captures with separate driver calls. Work that it captures on the communicator's stream, or on a stream
// that is ordered with it, is in its graph, also while somebody looks at the progress of calls.
func TestForeignCaptures(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes[:1])
	require.NoError(t, err)
	c := world[0]
	for _, observed := range []bool{false, true} {
		for _, separate := range []bool{false, true} {
			for _, mode := range []gputest.CaptureMode{gputest.CaptureGlobal, gputest.CaptureThreadLocal, gputest.CaptureRelaxed} {
				t.Run(fmt.Sprintf("observed %t, separate stream %t, %v", observed, separate, mode), func(t *testing.T) {
					end := func() {}
					if observed {
						end = repeat(func() { c.Progress() })
					}
					err := gputest.ForeignCapture(ctx, c, c.Runtime(), mode, separate)
					end()
					assert.NoError(t, err)
				})
			}
		}
	}
	require.NoError(t, c.Close())
}

// repeat calls f again and again on a goroutine, until the function that it returns is called.
func repeat(f func()) (end func()) {
	ended := make(chan struct{})
	var calls sync.WaitGroup
	calls.Go(func() {
		for {
			select {
			case <-ended:
				return
			default:
				f()
			}
		}
	})
	return func() {
		close(ended)
		calls.Wait()
	}
}

// A wait for a stream that a framework captures is refused, and the communicator goes on.
func TestForeignCaptureRefusesWaits(t *testing.T) {
	runtimes := openGPUs(t)
	ctx := t.Context()
	world, err := nccl.InProcess(ctx, runtimes[:1])
	require.NoError(t, err)
	c := world[0]
	for name, wait := range map[string]func() error{
		"sync":    func() error { return c.Sync(ctx) },
		"barrier": func() error { return c.Barrier(ctx) },
	} {
		waited, captured := gputest.ForeignWait(c.Runtime(), c.CommStream(), wait)
		t.Log(name, ": ", waited, "; ", captured)
		assert.ErrorIs(t, waited, comm.ErrArgument, name)
		assert.ErrorContains(t, waited, "captur", name)
		assert.Error(t, captured, "the wait ended the capture")
		assert.NoError(t, c.Barrier(ctx), "the communicator goes on")
	}
	require.NoError(t, c.Close())
}

package local_test

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
)

// TestDeadlineInABubble has ranks with a processor each wait for one that never calls. The clock of a
// bubble stands while a rank spins, so only ranks that stop spinning by themselves reach the deadline.
func TestDeadlineInABubble(t *testing.T) {
	const ranks = 3
	const limit = time.Minute
	for _, processors := range []int{1, 2, 4, 16} {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(processors))
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			err := local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				ctx, cancel := context.WithTimeout(ctx, limit)
				defer cancel()
				if c.Rank() == 1 {
					time.Sleep(2 * limit)
					return nil
				}
				err := c.Barrier(ctx)
				assert.Equal(t, limit, time.Since(began), "%d processors", processors)
				return err
			})
			assert.ErrorIs(t, err, comm.ErrTimeout, "%d processors", processors)
		})
	}
}

// TestCanceledInStep cancels ranks that are always in step: on one processor they never sleep, and end
// all the same.
func TestCanceledInStep(t *testing.T) {
	for _, processors := range []int{1, 2, 4} {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(processors))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		err := local.Run(ctx, 2, func(ctx context.Context, c comm.Communicator) error {
			for calls := 1; ; calls++ {
				if calls == 1000 && c.Rank() == 0 {
					cancel()
				}
				if err := c.Barrier(ctx); err != nil {
					return err
				}
			}
		})
		assert.ErrorIs(t, err, comm.ErrCanceled, "%d processors", processors)
	}
}

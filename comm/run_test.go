package comm_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
)

// closing is a decorator that has something to give back, and is no Ender.
type closing struct {
	comm.Wrapped
	closed *int
}

func (c closing) Close() error {
	*c.closed++
	return c.Communicator.Close()
}

// Run closes decorators around an Ender, whose peers learn the cause all the same.
func TestRunClosesDecorators(t *testing.T) {
	failure := errors.New("no more")
	for _, cause := range []error{nil, failure} {
		worlds, err := local.New(2)
		require.NoError(t, err)
		closed := make([]int, len(worlds))
		for r, c := range worlds {
			worlds[r] = closing{comm.Wrap(c), &closed[r]}
		}
		err = comm.Run(t.Context(), worlds, func(ctx context.Context, c comm.Communicator) error {
			if c.Rank() == 0 {
				return cause
			}
			if cause == nil {
				return nil
			}
			err := c.Barrier(context.WithoutCancel(ctx))
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorIs(t, err, failure)
			return nil
		})
		assert.ErrorIs(t, err, cause)
		assert.Equal(t, []int{1, 1}, closed)
	}
}

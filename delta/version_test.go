package delta_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestVersions: where publisher and subscriber are of different versions, whichever of them is the older one, the one
// that compares versions names both, and the other one is told.
func TestVersions(t *testing.T) {
	for _, older := range []int{0, 1} {
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			rt := cpu.New()
			const says = "speaks version 0 of deltas, rank"
			switch {
			case c.Rank() == older:
				_, err := distributed.AllGatherBytes(ctx, rt, c, []byte(`{"Publishes":true,"Version":1,"Digests":[1],"Others":[1]}`))
				require.NoError(t, err)
				err = c.Barrier(ctx)
				assert.ErrorIs(t, err, comm.ErrPeerFailed)
				assert.ErrorContains(t, err, says)
			case c.Rank() == 0:
				w := delta.Tensor{Name: "w", DType: dtype.U8, Shape: []int{3}, Memory: delta.Host{1, 2, 3}}
				err := delta.NewPublisher(rt, c).Publish(ctx, 1, []delta.Tensor{w})
				assert.ErrorIs(t, err, comm.ErrMismatch)
				assert.ErrorContains(t, err, says)
			default:
				s, err := delta.NewSubscriber(ctx, rt, c, delta.Config{})
				require.NoError(t, err)
				_, err = s.Update(ctx)
				assert.ErrorIs(t, err, comm.ErrMismatch)
				assert.ErrorContains(t, err, says)
			}
			return nil
		}))
	}
}

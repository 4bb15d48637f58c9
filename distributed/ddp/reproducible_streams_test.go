package ddp_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
)

// Ranks with streams, as GPUs have them, have the results of all others: they sum integers whatever the options are.
func TestReproducibleStreams(t *testing.T) {
	for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
		c := draw(dt, 15, true)
		want := c.means()
		for _, cfg := range []ddp.Config{
			{},
			{Config: sparse.Config{NoUndo: true}},
			{Config: sparse.Config{ClipNorm: 1e300}},
			{BucketBytes: 1},
		} {
			cfg.Reproducible = microbatches
			for _, size := range []int{1, 2, 3, 4} {
				err := local.Run(t.Context(), size, func(ctx context.Context, w comm.Communicator) error {
					host := standin.Borrow()
					rt := standin.NewOnStream(host)
					r, err := newBatchRank(ctx, rt, standin.NewByEvents(ctx, w), dt, cfg)
					if err != nil {
						return err
					}
					for range 2 {
						batches := assignments["in turn, backwards"](w.Rank(), size)
						if err := r.submit(ctx, c, batches, []int{5, 0, 3, 1, 4, 2}); err != nil {
							return err
						}
						if err := errors.Join(r.g.Wait(ctx), w.Sync(ctx), r.check(want)); err != nil {
							return err
						}
					}
					return errors.Join(r.close(), standin.Return(host))
				})
				require.NoError(t, err, "%v, %d ranks, %+v", dt, size, cfg)
			}
		}
	}
}

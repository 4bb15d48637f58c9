package ddp_test

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestValues reduces buckets whose values are rounded. Rounding errors come later, so that results of equal gradients
// add up to their average, as they do not without error feedback.
func TestValues(t *testing.T) {
	const n, ranks, steps = 3000, 3, 40
	for _, cfg := range []sparse.Config{
		{Values: sparse.I4}, {Values: sparse.I8}, {Pattern: sparse.TopkA, Density: 1, Values: sparse.I4},
		{Pattern: sparse.Chunked, Density: 1, Values: sparse.I2}, {Pattern: sparse.Auto, Density: 0.4, Values: sparse.I8},
	} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			var worst [2]float64
			for i, forgets := range []bool{false, true} {
				cfg := cfg
				cfg.NoErrorFeedback = forgets
				gradient, err := runtime.New(rt, dtype.F32, n, 1)
				if err != nil {
					return err
				}
				params := []*runtime.Tensor{gradient}
				g, err := ddp.New(ctx, rt, c, params, ddp.Config{Config: cfg})
				if err != nil {
					return err
				}
				sums, average := make([]float64, n), make([]float64, n)
				for rank := range ranks {
					for i, x := range standin.Normal(n, rank, 0) {
						average[i] += float64(x) / ranks
					}
				}
				for range steps {
					if err := errors.Join(runtime.CopyIn(gradient, standin.Normal(n, c.Rank(), 0)), g.ReduceAll(ctx, params)); err != nil {
						return err
					}
					result, err := runtime.ToSlice[float32](gradient)
					if err != nil {
						return err
					}
					for i, x := range result {
						sums[i] += float64(x) / steps
					}
				}
				for j := range sums {
					worst[i] = max(worst[i], math.Abs(sums[j]-average[j]))
				}
				if err := errors.Join(g.Close(), gradient.Free()); err != nil {
					return err
				}
			}
			assert.Less(t, worst[0], 0.5, "%+v", cfg)
			if cfg.Pattern != sparse.Auto { // what its choice loses is not the same
				assert.Less(t, 2*worst[0], worst[1], "%+v", cfg)
			}
			return nil
		})
	}
}

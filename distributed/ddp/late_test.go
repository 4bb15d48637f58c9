package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// failsAt is a communicator of whose calls of StreamWaitEvent one fails.
type failsAt struct {
	standin.ByEvents
	calls *int // until then; below 0: none
}

func (f failsAt) StreamWaitEvent(_, _ uintptr) error {
	if *f.calls--; *f.calls == 0 {
		return standin.ErrKernel
	}
	return nil
}

// The same of the buckets of a model, behind whose results the compute stream waits.
func TestFailureBehindResults(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		calls := 0
		memory := standin.NewBranching(rt)
		all := standin.Gradients(t, memory, 2)
		g, err := ddp.New(ctx, memory, failsAt{standin.NewByEvents(ctx, c), &calls}, all,
			ddp.Config{Config: sparse.Config{Pattern: "topkA", Density: 0.1}, DenseUpTo: -1})
		require.NoError(t, err)
		require.NoError(t, g.ReduceAll(ctx, all))
		calls = 0
		require.NoError(t, g.ReduceAll(ctx, all))
		calls = -calls // the last one
		err = g.ReduceAll(ctx, all)
		assert.ErrorIs(t, err, standin.ErrKernel)
		assert.NotContains(t, err.Error(), "undone")
		assert.ErrorIs(t, g.ReduceAll(ctx, all), standin.ErrKernel, "it stays")
		err = g.Close()
		standin.Free(t, all)
		return err
	})
}

// noticingBranches is a runtime with notices that can work beside itself.
type noticingBranches struct{ standin.Noticing }

func (b noticingBranches) Branch() (runtime.Runtime, error) {
	of := cpu.New()
	return noticingBranch{standin.NewNoticing(of, b.W, &standin.Stumbling{Kernels: of.Kernels()}, b.Rng)}, nil
}

type noticingBranch struct{ standin.Noticing }

func (noticingBranch) ComputeStream() uintptr { return standin.ComputeStream + 2 }

// The same in buckets that have one verdict: a step that one of them has dropped, is
// dropped in all, and what they read later is that of the step before.
func TestBucketsReadLater(t *testing.T) {
	const n, ranks, buckets, steps = 30_000, 2, 3, 40
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	overflows := rand.New(rand.NewPCG(seed, 1))
	bad := make([]int, steps) // a bucket with an overflow in a step, if it is one
	for step := range bad {
		bad[step] = overflows.IntN(4 * buckets)
	}
	run := func(streams bool) [][][]uint32 {
		all := make([][][]uint32, ranks)
		rt := cpu.New()
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			var memory runtime.Runtime = rt
			rank := c.Rank()
			if streams {
				memory = noticingBranches{Noticing: standin.NewNoticing(rt, new(standin.Waits), &standin.Stumbling{Kernels: rt.Kernels()}, rand.New(rand.NewPCG(seed, 7)))}
				c = standin.NewByEvents(ctx, c)
			}
			var params []*runtime.Tensor
			for range buckets {
				p, err := runtime.New(memory, dtype.F32, n)
				if err != nil {
					return err
				}
				params = append(params, p)
			}
			cfg := ddp.Config{BucketBytes: 4 * n, DenseUpTo: -1,
				Config: sparse.Config{Pattern: sparse.Oktopk, Density: 0.05}.Tuned(tuning.Tuning{ThresholdInterval: 10, RebalanceInterval: 25})}
			g, err := ddp.New(ctx, memory, c, params, cfg)
			if err != nil {
				return err
			}
			for step := range steps {
				for b, p := range params {
					x := standin.Normal(n, rank, step, b)
					if bad[step] == b && rank == 1 {
						x[step] = float32(math.NaN())
					}
					if err := runtime.CopyIn(p, x); err != nil {
						return err
					}
				}
				if err := g.ReduceAll(ctx, params); err != nil {
					return fmt.Errorf("step %d: %w", step, err)
				}
				if step%5 == 4 {
					stats, err := g.Stats(ctx)
					if err != nil {
						return err
					}
					if stats.Skipped != (bad[step] < buckets) {
						return fmt.Errorf("step %d: skipped %v", step, stats.Skipped)
					}
				}
				for _, p := range params {
					all[rank] = append(all[rank], standin.Bits(p))
				}
			}
			err = g.Close()
			for _, p := range params {
				err = errors.Join(err, p.Free())
			}
			return err
		}))
		require.NoError(t, rt.Close())
		return all
	}
	want, got := run(false), run(true)
	for rank := range want {
		for i := range want[rank] {
			require.True(t, slices.Equal(want[rank][i], got[rank][i]), "seed %d, rank %d, step %d, bucket %d has other bits", seed, rank, i/buckets, i%buckets)
		}
	}
}

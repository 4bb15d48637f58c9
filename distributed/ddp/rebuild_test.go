package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestFirstBucket: the first bucket is smaller than the others.
func TestFirstBucket(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 7) // of 400 bytes each
		g, err := ddp.New(ctx, rt, c, params, ddp.Config{BucketBytes: 1200, FirstBucketBytes: 400})
		require.NoError(t, err)
		assert.Equal(t, [][]int{{6}, {5, 4, 3}, {2, 1, 0}}, g.Buckets())
		require.NoError(t, g.Close())
		standin.Free(t, params)
		return nil
	})
}

// TestRebuild: after the first step all ranks have buckets in the order in which
// rank 0's gradients became ready, whatever their own, and averages stay right.
func TestRebuild(t *testing.T) {
	orders := [][]int{{0, 2, 4, 1}, {4, 3, 2, 1, 0}, {1, 0}} // what is not ready is left out
	standin.World(t, len(orders), func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 5)
		g, err := ddp.New(ctx, rt, c, params, ddp.Config{BucketBytes: 800, FirstBucketBytes: 400, Rebuild: true})
		require.NoError(t, err)
		assert.Equal(t, [][]int{{4}, {3, 2}, {1, 0}}, g.Buckets())
		for step := range 3 {
			given := make(map[int]bool)
			for _, i := range orders[c.Rank()] {
				given[i] = true
				require.NoError(t, params[i].Fill(float64(3*(i+step))))
				require.NoError(t, g.Ready(ctx, i, params[i]))
			}
			require.NoError(t, g.Wait(ctx))
			for i := range params {
				users := 0
				for _, order := range orders {
					for _, j := range order {
						if i == j {
							users++
						}
					}
				}
				values, err := cpu.Slice[float32](g.Result(i))
				require.NoError(t, err)
				assert.Equal(t, float32(users*(i+step)), values[99], "gradient %d in step %d", i, step)
				assert.Equal(t, given[i], g.Result(i) == params[i])
			}
			assert.Equal(t, [][]int{{0}, {2, 4}, {1, 3}}, g.Buckets())
		}
		require.NoError(t, g.Close())
		standin.Free(t, params)
		return nil
	})
}

// TestRebuildSymmetric: memory that the ranks have together is given back before
// other is allocated.
func TestRebuildSymmetric(t *testing.T) {
	s := &standin.Streamed{Runtime: cpu.New(), Reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		world := symmetric{StreamedComm: standin.NewStreamedComm(c, s), live: map[uintptr]int{}}
		params := standin.Gradients(t, s, 4)
		g, err := ddp.New(ctx, s, world, params, ddp.Config{BucketBytes: 1200, Rebuild: true})
		require.NoError(t, err)
		assert.Equal(t, [][]int{{3, 2, 1}, {0}}, g.Buckets())
		for step := range 3 {
			for i, p := range params {
				require.NoError(t, p.Fill(float64(i+step)))
				require.NoError(t, g.Ready(ctx, i, p))
			}
			require.NoError(t, g.Wait(ctx))
			assert.Equal(t, [][]int{{0, 1, 2}, {3}}, g.Buckets())
			assert.Len(t, world.live, 1)
			for i := range params {
				values, err := cpu.Slice[float32](g.Result(i))
				require.NoError(t, err)
				assert.EqualValues(t, i+step, values[99])
			}
		}
		require.NoError(t, g.Close())
		assert.Empty(t, world.live)
		standin.Free(t, params)
		return nil
	}))
	assert.NoError(t, s.Close())
}

// stingy is a runtime that fails when it is told to.
type stingy struct {
	*cpu.Runtime
	left       int // allocations until all fail; < 0: none does
	copiesFail atomic.Bool
}

func (s *stingy) Allocate(bytes int) (uintptr, error) {
	if s.left == 0 {
		return 0, fmt.Errorf("%w: told to fail", runtime.ErrOutOfMemory)
	}
	s.left--
	return s.Runtime.Allocate(bytes)
}

func (s *stingy) Copy(dst, src uintptr, bytes int) error {
	if s.copiesFail.Load() {
		return errStingy
	}
	return s.Runtime.Copy(dst, src, bytes)
}

var errStingy = errors.New("copy told to fail")

// TestRebuildFails: buckets that cannot be made anew are an error of Wait and of all that follows, until a Rebind: then there are
// those buckets, or the earlier ones where it came to none, as their configuration is wrong.
func TestRebuildFails(t *testing.T) {
	failed := 0
	for left := 0; left == failed; left++ {
		standin.World(t, 1, func(ctx context.Context, c comm.Communicator, memory *cpu.Runtime) error {
			rt := &stingy{Runtime: memory, left: -1}
			all := standin.Gradients(t, rt, 5)
			g, err := ddp.New(ctx, rt, c, all, ddp.Config{BucketBytes: 800, Rebuild: true, Uneven: true})
			require.NoError(t, err)
			for i, x := range all {
				require.NoError(t, g.Ready(ctx, i, x))
			}
			rt.left = left
			err = g.Wait(ctx)
			rt.left = -1
			if err != nil {
				failed++
				require.ErrorIs(t, err, runtime.ErrOutOfMemory)
				unusable(t, g, all, err)
				require.NoError(t, g.Rebind(ctx, c), "after %d allocations", left)
			}
			assert.Len(t, g.Buckets(), 3)
			return trains(t, g, all)
		})
	}
	assert.Greater(t, failed, 2, "also allocations of buckets")

	for _, rebind := range []bool{true, false} {
		standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			all, wrong := standin.Gradients(t, rt, 2), false
			g, err := ddp.New(ctx, rt, c, all, ddp.Config{Rebuild: true, Uneven: true, PerBucket: func(int, int) sparse.Config {
				if wrong {
					return sparse.Config{Pattern: "none such"}
				}
				return sparse.Config{}
			}})
			require.NoError(t, err)
			wrong = true
			err = g.ReduceAll(ctx, all)
			require.ErrorContains(t, err, "the buckets are not filled anew: bucket 0: gradients 0 to 1: ")
			require.ErrorContains(t, err, "none such")
			unusable(t, g, all, err)
			if !rebind {
				err = g.Close()
				standin.Free(t, all)
				return err
			}
			require.NoError(t, g.Rebind(ctx, c))
			assert.Equal(t, [][]int{{1, 0}}, g.Buckets())
			return trains(t, g, all)
		})
	}
}

// unusable: every method that has an error returns why the Gradients has failed, but for those that tell of the last complete step.
func unusable(t *testing.T, g *ddp.Gradients, all []*runtime.Tensor, cause error) {
	ctx := t.Context()
	cause = errors.Unwrap(cause) // without the operation
	for name, call := range map[string]func() error{
		"Ready":         func() error { return g.Ready(ctx, 0, all[0]) },
		"Wait":          func() error { return g.Wait(ctx) },
		"ReduceAll":     func() error { return g.ReduceAll(ctx, all) },
		"Join":          func() error { return g.Join(ctx, all, nil) },
		"Accumulate":    func() error { return g.Accumulate(0, all[0]) },
		"State":         func() error { _, err := g.State(ctx); return err },
		"SharedState":   func() error { _, err := g.SharedState(ctx); return err },
		"Restore":       func() error { return g.Restore(ctx, nil) },
		"ScaleResidual": func() error { return g.ScaleResidual(0.5) },
		"Residuals":     func() error { _, err := g.Residuals(); return err },
	} {
		assert.ErrorIs(t, call(), cause, name)
	}
	for name, call := range map[string]func() error{
		"Shards":    func() error { _, err := g.Shards(); return err },
		"Scatter":   func() error { return g.Scatter(nil, all) },
		"Gather":    func() error { return g.Gather(ctx, all, nil) },
		"ShardNorm": func() error { _, err := g.ShardNorm(ctx); return err },
	} {
		assert.ErrorIs(t, call(), comm.ErrArgument, "%s, without Config.Shard", name)
	}
	stats, err := g.Stats(ctx)
	assert.NoError(t, err)
	assert.Positive(t, stats.Buckets)
	for i := range g.Buckets() {
		_, err = g.BucketStats(ctx, i)
		assert.NoError(t, err)
	}
	for i, x := range all {
		assert.Same(t, x, g.Result(i))
	}
	assert.False(t, g.RollsBack())
	assert.Nil(t, g.Views())
	assert.Len(t, g.Patterns(), len(g.Buckets()))
	assert.Zero(t, g.Stream())
}

// trains makes a step, and closes.
func trains(t *testing.T, g *ddp.Gradients, all []*runtime.Tensor) error {
	for i, x := range all {
		require.NoError(t, x.Fill(float64(i)))
	}
	require.NoError(t, g.ReduceAll(t.Context(), all))
	for i, x := range all {
		values, err := cpu.Slice[float32](x)
		require.NoError(t, err)
		assert.EqualValues(t, i, values[99])
	}
	err := g.Close()
	standin.Free(t, all)
	return err
}

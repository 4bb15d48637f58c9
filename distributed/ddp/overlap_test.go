package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestSharedMemory: two gradients that share memory are refused wherever they are passed, in each way to reduce, and
// the step goes on with others. Tensors that take each other's memory from step to step are fine.
func TestSharedMemory(t *testing.T) {
	for _, n := range []int{10, 10_000} {
		for name, cfg := range map[string]ddp.Config{
			"plain": {}, "sum": {Sum: true}, "wire": {Wire: dtype.BF16}, "views": {BucketViews: true}, "uneven": {Uneven: true},
			"clipped": {Config: sparse.Config{ClipNorm: 1e9}}, "shard": {Shard: true},
			"sparse": {Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1},
		} {
			t.Run(fmt.Sprintf("%s/%d", name, n), func(t *testing.T) {
				standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
					memory, err := runtime.New(rt, dtype.F32, 4*n)
					require.NoError(t, err)
					part := func(from int) *runtime.Tensor {
						p, err := memory.Slice(0, from, from+n)
						require.NoError(t, err)
						return p
					}
					a, b, half := part(0), part(n), part(n/2)
					refused := func(err error) {
						t.Helper()
						assert.ErrorIs(t, err, comm.ErrArgument)
						assert.ErrorContains(t, err, "0 and 1")
					}
					for _, params := range [][]*runtime.Tensor{{a, a}, {a, half}, {half, a}} {
						_, err := ddp.New(ctx, rt, c, params, cfg)
						refused(err)
					}
					g, err := ddp.New(ctx, rt, c, []*runtime.Tensor{a, b}, cfg)
					require.NoError(t, err)
					check := func(x, y *runtime.Tensor) {
						t.Helper()
						if cfg.Shard {
							return
						}
						for i, given := range []*runtime.Tensor{x, y} {
							values, err := runtime.ToSlice[float32](given)
							require.NoError(t, err)
							want := float32(i) + 1.5
							if cfg.Sum {
								want = 2*float32(i) + 3
							}
							assert.Equal(t, want, values[n-1])
						}
					}
					step := func(x, y *runtime.Tensor) {
						t.Helper()
						require.NoError(t, errors.Join(x.Fill(float64(1+c.Rank())), y.Fill(float64(2+c.Rank()))))
						require.NoError(t, g.ReduceAll(ctx, []*runtime.Tensor{x, y}))
						check(x, y)
					}
					refused(g.ReduceAll(ctx, []*runtime.Tensor{a, a}))
					refused(g.ReduceAll(ctx, []*runtime.Tensor{half, a}))
					if cfg.Uneven {
						refused(g.Join(ctx, []*runtime.Tensor{a, a}, nil))
					}
					step(a, b)
					step(b, a)            // each in the other's memory
					step(half, part(2*n)) // half of which was the other's
					step(part(3*n), half)

					require.NoError(t, errors.Join(a.Fill(float64(1+c.Rank())), b.Fill(float64(2+c.Rank()))))
					require.NoError(t, g.Ready(ctx, 0, a))
					refused(g.Ready(ctx, 1, half))
					if !cfg.Shard {
						refused(g.Accumulate(1, half))
					}
					require.NoError(t, g.Ready(ctx, 1, b))
					require.NoError(t, g.Wait(ctx))
					check(a, b)
					if cfg.BucketViews {
						views := g.Views()
						assert.ErrorIs(t, g.Ready(ctx, 0, views[1]), comm.ErrArgument)
						step(views[0], b)
						step(a, views[1])
						step(views[0], views[1])
					}
					err = g.Close()
					standin.Free(t, []*runtime.Tensor{a, b, half, memory})
					return err
				})
			})
		}
	}
}

// TestShardsShareMemory: Gather and Scatter refuse tensors that they would overwrite with another one's elements.
func TestShardsShareMemory(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 2)
		g, err := ddp.New(ctx, rt, c, all, ddp.Config{Shard: true})
		require.NoError(t, err)
		require.NoError(t, g.ReduceAll(ctx, all))
		shards, err := g.Shards()
		require.NoError(t, err)
		own, err := runtime.New(rt, dtype.F32, shards.Buckets[0].Tensor.Len())
		require.NoError(t, err)
		shared, err := all[0].Slice(0, 0, min(own.Len(), all[0].Len()))
		require.NoError(t, err)
		twice := []*runtime.Tensor{all[0], all[0]}
		assert.ErrorIs(t, shards.Gather(ctx, twice, []*runtime.Tensor{own}), comm.ErrArgument)
		assert.ErrorIs(t, shards.Scatter([]*runtime.Tensor{own}, twice), comm.ErrArgument)
		if shared.Len() == own.Len() {
			err := shards.Scatter([]*runtime.Tensor{shared}, all)
			assert.ErrorIs(t, err, comm.ErrArgument)
			assert.ErrorContains(t, err, "shard 0 shares memory with tensor 0")
		}
		require.NoError(t, errors.Join(shards.Scatter([]*runtime.Tensor{own}, all), shards.Gather(ctx, all, []*runtime.Tensor{own})))
		err = g.Close()
		standin.Free(t, append(all, own, shared))
		return err
	})
}

// TestReducerMemorySharesMemory: memory of a Reducer that would be saved and scaled twice is refused.
func TestReducerMemorySharesMemory(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 1)
		_, err := ddp.New(ctx, rt, c, all, ddp.Config{Reducer: func(b ddp.Bucket) (ddp.Reducer, error) {
			residual, err := b.Tensor.Slice(0, 0, b.Tensor.Len())
			return &halves{residual: residual}, err
		}})
		assert.ErrorIs(t, err, comm.ErrArgument)
		standin.Free(t, all)
		return nil
	})
}

package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// like returns tensors like others.
func like(t *testing.T, rt runtime.Runtime, of []*runtime.Tensor) []*runtime.Tensor {
	all := make([]*runtime.Tensor, len(of))
	for i, x := range of {
		var err error
		all[i], err = runtime.New(rt, x.DType(), x.Len())
		require.NoError(t, err)
	}
	return all
}

// tensorsOf are those of shards.
func tensorsOf(shards *ddp.Shards) (all []*runtime.Tensor) {
	for _, s := range shards.Buckets {
		all = append(all, s.Tensor)
	}
	return all
}

// TestShards: gathered, shards are the averages that every rank has without them, bit for bit, with the
// same norm, in buckets with and without padding, also when gradients live in them, arrive in another
// order, are left out, or are accumulated, on streams, and with fewer ranks afterwards.
func TestShards(t *testing.T) {
	const steps = 3
	for ranks := 1; ranks <= 5; ranks++ {
		for _, k := range []struct {
			name string
			ddp.Config
			streams bool
		}{
			{name: "buckets", Config: ddp.Config{BucketBytes: 6000}},
			{name: "one bucket", Config: ddp.Config{BucketBytes: 1 << 20}, streams: true},
			{name: "views, sums", Config: ddp.Config{BucketBytes: 6000, BucketViews: true, Sum: true}},
		} {
			label := fmt.Sprintf("%d ranks, %s", ranks, k.name)
			fewer, err := local.New(max(1, ranks-1))
			require.NoError(t, err)
			standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				memory, ordered := runtime.Runtime(rt), func(c comm.Communicator) comm.Communicator { return c }
				if k.streams {
					memory, ordered = standin.NewOnStream(rt), func(c comm.Communicator) comm.Communicator { return standin.NewOrdered(ctx, c) }
				}
				whole, err := newModel(ctx, memory, ordered(c), k.Config)
				require.NoError(t, err)
				cfg := k.Config
				cfg.Shard = true
				cut, err := newModel(ctx, memory, ordered(c), cfg)
				require.NoError(t, err)
				all := like(t, memory, whole.params)
				for step := range steps {
					if step == steps-1 && ranks > 1 {
						if c.Rank() == ranks-1 {
							break
						}
						defer fewer[c.Rank()].Close()
						require.NoError(t, errors.Join(whole.sync.Rebind(ctx, ordered(fewer[c.Rank()])), cut.sync.Rebind(ctx, ordered(fewer[c.Rank()]))))
					}
					for _, m := range []*model{whole, cut} {
						given := m.params
						if k.BucketViews {
							given = m.sync.Views()
						}
						require.NoError(t, m.load(step))
						if given[0] != m.params[0] {
							for i, v := range given {
								require.NoError(t, runtime.CopyIn(v, standin.Normal(v.Len(), m.rank, step, i)))
							}
						}
						for i := range given { // in the order of the forward pass, without the last
							if step == 1 && i == len(given)-1 {
								require.NoError(t, m.sync.Accumulate(i, given[i])) // it is left out, but for what was accumulated
								continue
							}
							require.NoError(t, m.sync.Ready(ctx, i, given[i]))
						}
						require.NoError(t, m.sync.Wait(ctx))
					}
					shards, err := cut.sync.Shards()
					require.NoError(t, err)
					norm, err := shards.Norm(ctx)
					require.NoError(t, err)
					require.NoError(t, shards.Gather(ctx, all, tensorsOf(shards)))
					squares := 0.0
					for i, x := range all {
						want, err := runtime.ToSlice[float32](whole.sync.Result(i))
						require.NoError(t, err)
						got, err := runtime.ToSlice[float32](x)
						require.NoError(t, err)
						require.Equal(t, want, got, "%s, step %d, gradient %d", label, step, i)
						for _, v := range got {
							squares += float64(v) * float64(v)
						}
					}
					assert.InEpsilon(t, math.Sqrt(squares), norm, 1e-9, label)
				}
				standin.Free(t, all)
				return errors.Join(whole.close(), cut.close())
			})
		}
	}
}

// Gather restores what Scatter splits, for any number of ranks.
func TestScatterAndGather(t *testing.T) {
	for ranks := 1; ranks <= 4; ranks++ {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, ddp.Config{Shard: true})
			require.NoError(t, err)
			own, err := m.sync.Shards()
			require.NoError(t, err)
			shards, whole, again := like(t, rt, tensorsOf(own)), like(t, rt, m.params), like(t, rt, m.params)
			elements := 0
			for i, x := range whole {
				require.NoError(t, runtime.CopyIn(x, standin.Normal(x.Len(), i)))
			}
			for _, s := range own.Buckets {
				for _, p := range s.Parts {
					elements += p.To - p.From
					assert.LessOrEqual(t, p.Offset+p.To-p.From, s.Tensor.Len())
				}
			}
			assert.NotZero(t, elements)
			require.NoError(t, own.Scatter(shards, whole))
			require.NoError(t, own.Gather(ctx, again, shards))
			for i := range whole {
				assert.Equal(t, standin.Bits(whole[i]), standin.Bits(again[i]), "%d ranks, tensor %d", ranks, i)
			}

			assert.ErrorIs(t, own.Scatter(shards[1:], whole), comm.ErrArgument)
			assert.ErrorIs(t, own.Gather(ctx, again, append([]*runtime.Tensor{whole[0]}, shards[1:]...)), runtime.ErrShape)
			assert.ErrorIs(t, own.Gather(ctx, again[1:], shards), comm.ErrArgument)
			require.NoError(t, m.sync.Ready(ctx, 0, m.params[0]))
			_, err = m.sync.Shards()
			assert.ErrorContains(t, err, "in the middle of a step")
			require.NoError(t, m.sync.Wait(ctx))
			for _, all := range [][]*runtime.Tensor{shards, whole, again} {
				standin.Free(t, all)
			}
			return m.close()
		})
	}
}

// A gradient that is not finite on one rank makes the norm so on all; what needs more than a shard is refused.
func TestShardNormIsNotFinite(t *testing.T) {
	standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		m, err := newModel(ctx, rt, c, ddp.Config{Shard: true})
		require.NoError(t, errors.Join(err, m.load(0)))
		if c.Rank() == 1 {
			require.NoError(t, m.params[2].Fill(math.Inf(1)))
		}
		require.NoError(t, m.sync.ReduceAll(ctx, m.params))
		shards, err := m.sync.Shards()
		require.NoError(t, err)
		norm, err := shards.Norm(ctx)
		require.NoError(t, err)
		assert.True(t, math.IsNaN(norm) || math.IsInf(norm, 0), "%v", norm)
		for _, cfg := range []ddp.Config{sparseModel, {Config: sparse.Config{ClipNorm: 1}}, {Wire: dtype.BF16}} {
			cfg.Shard = true
			_, err := ddp.New(ctx, rt, c, m.params, cfg)
			assert.ErrorIs(t, err, comm.ErrArgument, "%+v", cfg)
		}
		plain, err := ddp.New(ctx, rt, c, m.params, ddp.Config{})
		require.NoError(t, err)
		_, err = plain.Shards()
		assert.ErrorIs(t, err, comm.ErrArgument)
		return errors.Join(plain.Close(), m.close())
	})
}

// Shards from before a Rebind are refused, as the world has another size.
func TestShardsAfterRebind(t *testing.T) {
	fewer, err := local.New(2)
	require.NoError(t, err)
	standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		m, err := newModel(ctx, rt, c, ddp.Config{Shard: true})
		require.NoError(t, err)
		before, err := m.sync.Shards()
		require.NoError(t, err)
		if c.Rank() == 2 {
			return m.close()
		}
		defer fewer[c.Rank()].Close()
		require.NoError(t, m.sync.Rebind(ctx, fewer[c.Rank()]))
		_, err = before.Norm(ctx)
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorIs(t, before.Scatter(tensorsOf(before), m.params), comm.ErrArgument)
		assert.ErrorIs(t, before.Gather(ctx, m.params, tensorsOf(before)), comm.ErrArgument)
		after, err := m.sync.Shards()
		require.NoError(t, err)
		require.NoError(t, m.load(0))
		require.NoError(t, m.sync.ReduceAll(ctx, m.params))
		_, err = after.Norm(ctx)
		return errors.Join(err, m.close())
	})
}

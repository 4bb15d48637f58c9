package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// splitSeed is the seed of what the tests here draw.
const splitSeed = 17

// drawLong draws ordinary contributions to parameters of these lengths.
func drawLong(lengths []int) *contributions {
	c := &contributions{dt: dtype.F32}
	for m := range microbatches {
		var all [][]float32
		for i, n := range lengths {
			all = append(all, standin.Normal(n, splitSeed, m*len(lengths)+i))
		}
		c.values = append(c.values, all)
	}
	return c
}

// means are the averages of all parameters.
func (c *contributions) means() (want [][]float32) {
	for i := range c.values[0] {
		want = append(want, c.mean(i, 27))
	}
	return want
}

// meshOf arranges ranks in a grid.
func meshOf(sizes []int) func(context.Context, comm.Communicator) (*distributed.Mesh, error) {
	return func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
		var dims []distributed.Dim
		for i, size := range sizes {
			dims = append(dims, distributed.Dim{Name: fmt.Sprint("d", i), Size: size})
		}
		return distributed.NewMesh(ctx, c, dims...)
	}
}

// Sums along a mesh are those of all ranks: of any shape, with padding, in turns, weighted, and after a move to a mesh of
// another shape.
func TestReproducibleMesh(t *testing.T) {
	long := []int{100, 140_001, 5}
	cases := []*contributions{draw(dtype.F32, 3, false), draw(dtype.BF16, 4, true), drawLong(long)}
	cases[0].weights = []float64{1, 2, 3, 0, 5, 6, 7, 8, 1000, 10, 11, 12}
	for number, c := range cases {
		want := c.means()
		var params []int
		for _, x := range c.values[0] {
			params = append(params, len(x))
		}
		for _, sizes := range [][]int{{1}, {3}, {1, 2}, {2, 1}, {2, 3}, {3, 2}, {2, 3, 2}} {
			world := 1
			for _, n := range sizes {
				world *= n
			}
			standin.World(t, world, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
				turned := slices.Clone(sizes)
				cfg := ddp.Config{Reproducible: microbatches, Weighted: c.weights != nil}
				cfg.NoUndo = number == 2
				cfg.Mesh = func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
					slices.Reverse(turned)
					return meshOf(turned)(ctx, c)
				}
				r, err := newBatchRankOf(ctx, rt, w, c.dt, cfg, params)
				require.NoError(t, err)
				order := rand.New(rand.NewPCG(splitSeed, uint64(w.Rank()))).Perm(len(params))
				batches := assignments["in turn, backwards"](w.Rank(), world)
				for range 2 {
					require.NoError(t, r.submit(ctx, c, batches, order))
					require.NoError(t, errors.Join(r.g.Wait(ctx), r.check(want)), "case %d, mesh %v", number, sizes)
					require.NoError(t, r.g.Rebind(ctx, w))
				}
				return r.close()
			})
		}
	}
}

// sharded makes a step with shards, and returns the results, put together, and their norm.
func sharded(t *testing.T, size int, cfg ddp.Config, c *contributions) (results [][]float32, norm float64) {
	cfg.Shard = true
	cfg.Reproducible = microbatches
	cfg.Weighted = c.weights != nil
	cfg.BucketBytes = 9000
	standin.World(t, size, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		r, err := newBatchRank(ctx, rt, w, c.dt, cfg)
		require.NoError(t, err)
		var shards []*runtime.Tensor
		for range 2 {
			batches := assignments["one after the other"](w.Rank(), size)
			require.NoError(t, r.submit(ctx, c, batches, []int{5, 3, 1, 0, 2, 4}))
			require.NoError(t, r.g.Wait(ctx))
		}
		if len(assignments["one after the other"](w.Rank(), size)) > 0 {
			last, err := values(r.params[3])
			require.NoError(t, err)
			batches := assignments["one after the other"](w.Rank(), size)
			assert.True(t, slices.EqualFunc(c.values[batches[len(batches)-1]][3], last, sameBits), "gradients are as they were")
		}
		local, err := r.g.Shards()
		require.NoError(t, err)
		for range 2 {
			all, err := local.Norm(ctx)
			require.NoError(t, err)
			if w.Rank() == size-1 {
				norm = all
			}
		}
		for _, s := range local.Buckets {
			shards = append(shards, s.Tensor)
			filled := 0
			for _, p := range s.Parts {
				filled += p.To - p.From
			}
			all, err := values(s.Tensor)
			require.NoError(t, err)
			assert.Equal(t, make([]float32, len(all)-filled), all[filled:], "padding of rank %d", w.Rank())
		}
		whole := make([]*runtime.Tensor, len(r.params))
		for i, p := range r.params {
			whole[i], err = runtime.New(rt, p.DType(), p.Len())
			require.NoError(t, err)
		}
		require.NoError(t, local.Gather(ctx, whole, shards))
		for _, x := range whole {
			v, err := values(x)
			require.NoError(t, err)
			if w.Rank() == size-1 {
				results = append(results, v)
			}
			require.NoError(t, x.Free())
		}
		return r.close()
	})
	return results, norm
}

func sameBits(a, b float32) bool { return a == b || a != a && b != b }

func sameResults(a, b [][]float32) bool {
	return slices.EqualFunc(a, b, func(x, y []float32) bool { return slices.EqualFunc(x, y, sameBits) })
}

// Shards, put together, and their norm are the same for any number of ranks, also where results are clipped.
func TestReproducibleShards(t *testing.T) {
	weighted := draw(dtype.F32, 6, false)
	weighted.weights = []float64{4, 0, 1, 1, 1 << 20, 3, 3, 9, 1, 1, 2, 100}
	for number, c := range []*contributions{draw(dtype.F32, 5, false), draw(dtype.BF16, 7, false), weighted} {
		want := c.means()
		for _, limit := range []float64{0, 0.5} {
			var first [][]float32
			var firstNorm float64
			for _, size := range []int{1, 2, 3, 5, 12} {
				got, norm := sharded(t, size, ddp.Config{Config: sparse.Config{ClipNorm: limit}}, c)
				if first == nil {
					first = got
					firstNorm = norm
				}
				assert.True(t, sameResults(first, got), "case %d, limit %v, %d ranks", number, limit, size)
				assert.Equal(t, math.Float64bits(firstNorm), math.Float64bits(norm), "norm of %d ranks", size)
			}
			if limit == 0 {
				assert.True(t, sameResults(want, first), "case %d", number)
			}
			square := 0.0
			for _, x := range first {
				for _, v := range x {
					square += float64(v) * float64(v)
				}
			}
			assert.InEpsilon(t, math.Sqrt(square), firstNorm, 1e-2)
		}
	}
}

// Means are over the samples of all contributions, whoever has them: one of weight 0 counts for nothing, whatever it is.
func TestReproducibleWeighted(t *testing.T) {
	for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
		c := draw(dt, 12, false)
		c.weights = []float64{3, 1, 4, 1, 0, 9, 2, 6, 5, 3, 5, 8}
		c.values[4] = draw(dt, 13, true).values[4]
		want := c.means()
		for _, size := range []int{1, 2, 3, 6, 13} {
			for name, assign := range assignments {
				standin.World(t, size, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
					f := standin.NewFaulty(w)
					r, err := newBatchRank(ctx, rt, f, dt, ddp.Config{Reproducible: microbatches, Weighted: true})
					require.NoError(t, err)
					batches := assign(w.Rank(), size)
					order := []int{2, 0, 1, 5, 4, 3}
					require.NoError(t, r.submit(ctx, c, batches, order))
					require.NoError(t, errors.Join(r.g.Wait(ctx), r.check(want)), "%v, %d ranks, %s", dt, size, name)
					stats, err := r.g.Stats(ctx)
					require.NoError(t, err)
					assert.Equal(t, 47.0, stats.Weight)

					r.g.BeforeCommit(func(context.Context) error { return standin.ErrFault })
					require.NoError(t, r.submit(ctx, c, batches, order))
					require.ErrorIs(t, r.g.Wait(ctx), standin.ErrFault)
					r.g.BeforeCommit(nil)
					if len(batches) > 0 {
						err = r.g.ReduceAll(ctx, r.params)
					} else {
						err = r.g.Wait(ctx)
					}
					require.NoError(t, errors.Join(err, r.check(want)), "repeated: %v, %d ranks, %s", dt, size, name)
					return r.close()
				})
			}
		}
	}
}

// A step that is left out after it was rolled back adds nothing to the next one, which begins with Weigh.
func TestReproducibleWeightedLeftOut(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 1)
		g, err := ddp.New(ctx, rt, w, params, ddp.Config{Reproducible: 4, Weighted: true})
		require.NoError(t, err)
		for _, weight := range []float64{0.5, math.Pi, 1<<24 + 1} {
			err := g.Weigh(weight)
			assert.ErrorIs(t, err, comm.ErrArgument)
			assert.ErrorContains(t, err, "want a whole number of at most 16777216 with Reproducible")
		}
		g.BeforeCommit(func(context.Context) error { return standin.ErrFault })
		require.NoError(t, errors.Join(params[0].Fill(100), g.Weigh(2), g.Accumulate(0, params[0])))
		require.ErrorIs(t, g.ReduceAll(ctx, params), standin.ErrFault)
		g.BeforeCommit(nil)
		require.NoError(t, errors.Join(params[0].Fill(3), g.Weigh(1), g.Accumulate(0, params[0])))
		require.NoError(t, errors.Join(params[0].Fill(6), g.Weigh(2), g.ReduceAll(ctx, params)))
		got, err := values(params[0])
		require.NoError(t, err)
		assert.Equal(t, slices.Repeat([]float32{5}, 100), got)
		standin.Free(t, params)
		return g.Close()
	})
}

// Clipped results are the same along a mesh as without one.
func TestReproducibleMeshClips(t *testing.T) {
	c := draw(dtype.F32, 14, false)
	var mu sync.Mutex
	var first [][]float32
	for _, sizes := range [][]int{nil, {2, 3}, {3, 2}, {2, 2}} {
		world := 1
		for _, n := range sizes {
			world *= n
		}
		cfg := ddp.Config{Reproducible: microbatches, Config: sparse.Config{ClipNorm: 0.25, NonFinite: sparse.SkipNonFinite}}
		if sizes != nil {
			cfg.Mesh = meshOf(sizes)
		}
		standin.World(t, world, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
			r, err := newBatchRank(ctx, rt, w, c.dt, cfg)
			require.NoError(t, err)
			require.NoError(t, r.submit(ctx, c, assignments["all on the last"](w.Rank(), world), []int{0, 1, 2, 3, 4, 5}))
			require.NoError(t, r.g.Wait(ctx))
			mu.Lock()
			defer mu.Unlock()
			if first == nil {
				for i := range lengths {
					v, err := values(r.g.Result(i))
					require.NoError(t, err)
					first = append(first, v)
				}
			}
			return errors.Join(r.check(first), r.close())
		})
	}
}

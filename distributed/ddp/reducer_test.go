package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// halves sends the even elements in one step and the odd ones in the next, and keeps the others.
type halves struct {
	residual *runtime.Tensor
	fails    error // of the next Reduce, when it has changed the residual
}

func (h *halves) Memory() ddp.Memory { return ddp.Memory{Residual: []*runtime.Tensor{h.residual}} }

func (h *halves) Reduce(ctx context.Context, b ddp.Bucket) error {
	x, err := runtime.ToSlice[float32](b.Tensor)
	if err != nil {
		return err
	}
	kept, err := runtime.ToSlice[float32](h.residual)
	if err != nil {
		return err
	}
	for i := range x {
		x[i] += kept[i]
		kept[i] = 0
		if i%2 != b.Step%2 {
			kept[i], x[i] = x[i], 0
		}
	}
	if err := errors.Join(runtime.CopyIn(b.Tensor, x), runtime.CopyIn(h.residual, kept), h.fails); err != nil {
		return err
	}
	return distributed.AllReduce(ctx, b.Comm, b.Tensor, comm.Avg)
}

// TestNoReducer: a bucket that a program leaves to the configuration costs what it costs without a Reducer.
func TestNoReducer(t *testing.T) {
	standin.FreshWorld(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 3)
		before := rt.Stats().LiveBytes
		memory := func(reducer func(ddp.Bucket) (ddp.Reducer, error)) int64 {
			g, err := ddp.New(ctx, rt, c, params, ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}, DenseUpTo: -1, Reducer: reducer})
			require.NoError(t, err)
			live := rt.Stats().LiveBytes
			require.NoError(t, errors.Join(g.ReduceAll(ctx, params), g.Close()))
			assert.Equal(t, before, rt.Stats().LiveBytes)
			return live
		}
		assert.Equal(t, memory(nil), memory(func(ddp.Bucket) (ddp.Reducer, error) { return nil, nil }))
		standin.Free(t, params)
		return nil
	})
}

// A program's own reducer has what other buckets have: its steps are rolled back with the others,
// skipped where a gradient is not finite, saved and restored.
func TestOwnReducer(t *testing.T) {
	errBroken := errors.New("this one is to fail")
	shapes := [][]int{{4, 5}, {7}, {40}, {3, 3}}
	for _, device := range []string{"host", "streams", "side stream"} {
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			memory := standin.Borrow()
			var rt runtime.Runtime = memory
			switch device {
			case "streams":
				rt, c = standin.NewOnStream(memory), standin.NewOrdered(ctx, c)
			case "side stream":
				rt, c = standin.NewForking(memory), standin.NewByEvents(ctx, c)
			}
			var params []*runtime.Tensor
			for _, s := range shapes {
				p, err := runtime.New(rt, dtype.F32, s...)
				require.NoError(t, err)
				params = append(params, p)
			}
			var own []*halves
			build := func() *ddp.Gradients {
				own = nil
				g, err := ddp.New(ctx, rt, c, params, ddp.Config{BucketBytes: 120, Config: sparse.Config{NonFinite: sparse.SkipNonFinite},
					Reducer: func(b ddp.Bucket) (ddp.Reducer, error) {
						if b.Index == 1 {
							return nil, nil // a dense one
						}
						end := 0
						for _, p := range b.Parts {
							assert.Equal(t, end, p.Offset)
							assert.Equal(t, shapes[p.Param], p.Shape)
							end += params[p.Param].Len()
						}
						assert.Equal(t, b.Tensor.Len(), end)
						residual, err := runtime.New(b.Tensor.Runtime(), dtype.F32, end)
						own = append(own, &halves{residual: residual})
						return own[len(own)-1], errors.Join(err, residual.Fill(0))
					}})
				require.NoError(t, err)
				return g
			}
			g := build()
			require.Len(t, own, 2, "of three buckets")
			value := func(rank, step, i, j int) float32 { return float32((7*rank + 3*step + 5*i + j) % 11) } // sums are exact
			load := func(step int) {
				for i, p := range params {
					x := make([]float32, p.Len())
					for j := range x {
						x[j] = value(c.Rank(), step, i, j)
					}
					if step == 2 && i == 1 && c.Rank() == 1 {
						x[3] = float32(math.NaN())
					}
					require.NoError(t, runtime.CopyIn(p, x))
				}
			}
			bits := func() (all [][]uint32) {
				for _, p := range params {
					all = append(all, standin.Bits(p))
				}
				return all
			}
			var saved []byte
			var after [][]uint32
			want := make([][]float32, len(params)) // what all ranks together have not sent
			made := 0
			for step := range 6 {
				load(step)
				given := bits()
				if step == 3 { // on all ranks, then again
					own[0].fails = errBroken
					assert.ErrorIs(t, g.ReduceAll(ctx, params), errBroken, device)
					assert.Equal(t, given, bits(), "%s: gradients are as before", device)
					own[0].fails = nil
				}
				if err := g.ReduceAll(ctx, params); err != nil {
					return err
				}
				stats, err := g.Stats(ctx)
				require.NoError(t, err)
				assert.Equal(t, step == 2, stats.Skipped, "%s, step %d", device, step)
				for i, p := range params {
					x, err := runtime.ToSlice[float32](p)
					require.NoError(t, err)
					if want[i] == nil {
						want[i] = make([]float32, len(x))
					}
					bucket := slices.IndexFunc(g.Buckets(), func(b []int) bool { return slices.Contains(b, i) })
					offset := 0
					for _, o := range g.Buckets()[bucket] {
						if o == i {
							break
						}
						offset += params[o].Len()
					}
					for j := range x {
						sum := float32(0)
						if !stats.Skipped {
							want[i][j] += value(0, step, i, j) + value(1, step, i, j)
							if bucket == 1 || (offset+j)%2 == made%2 {
								sum, want[i][j] = want[i][j], 0
							}
						}
						require.Equal(t, sum/2, x[j], "%s, step %d, gradient %d, element %d", device, step, i, j)
					}
				}
				if !stats.Skipped {
					made++
				}
				if step == 4 {
					saved, err = g.State(ctx)
					require.NoError(t, err)
				}
				after = bits()
			}
			require.NoError(t, g.Close())
			g = build()
			require.NoError(t, g.Restore(ctx, saved))
			load(5)
			require.NoError(t, g.ReduceAll(ctx, params))
			assert.Equal(t, after, bits(), "%s: goes on from the state", device)
			require.NoError(t, g.Close())
			standin.Free(t, params)
			return standin.Return(memory)
		}), fmt.Sprint(device))
	}
}

// The residual of a program's reducer is scaled like other residuals.
func TestOwnReducerScaleResidual(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 1)
		g, err := ddp.New(ctx, rt, c, all, ddp.Config{Reducer: func(b ddp.Bucket) (ddp.Reducer, error) {
			residual, err := runtime.New(rt, dtype.F32, b.Tensor.Len())
			return &halves{residual: residual}, errors.Join(err, residual.Fill(0))
		}})
		require.NoError(t, err)
		require.NoError(t, errors.Join(all[0].Fill(4), g.ReduceAll(ctx, all)))
		assert.ErrorIs(t, g.ScaleResidual(-1), comm.ErrArgument)
		assert.ErrorIs(t, g.ScaleResidual(math.NaN()), comm.ErrArgument)
		require.NoError(t, errors.Join(g.ScaleResidual(0.5), all[0].Fill(4), g.ReduceAll(ctx, all)))
		x, err := runtime.ToSlice[float32](all[0])
		require.NoError(t, err)
		assert.Equal(t, []float32{0, 6, 0, 6}, x[:4])
		standin.Free(t, all)
		return g.Close()
	})
}

// In a world of another size the residuals of a program's reducers keep their sum.
func TestOwnReducerOtherWorld(t *testing.T) {
	const n = 100
	states := make([][]byte, 2)
	world := func(ranks int, body func(ctx context.Context, g *ddp.Gradients, own *halves, rank int, all []*runtime.Tensor) error) {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			all := standin.Gradients(t, rt, 1)
			var own *halves
			g, err := ddp.New(ctx, rt, c, all, ddp.Config{Reducer: func(b ddp.Bucket) (ddp.Reducer, error) {
				residual, err := runtime.New(rt, dtype.F32, n)
				own = &halves{residual: residual}
				return own, errors.Join(err, residual.Fill(0))
			}})
			if err == nil {
				err = body(ctx, g, own, c.Rank(), all)
			}
			standin.Free(t, all)
			return errors.Join(err, g.Close())
		})
	}
	world(2, func(ctx context.Context, g *ddp.Gradients, _ *halves, rank int, all []*runtime.Tensor) (err error) {
		if err := errors.Join(all[0].Fill(float64(rank+1)), g.ReduceAll(ctx, all)); err != nil {
			return err
		}
		states[rank], err = g.State(ctx)
		return err
	})
	for _, ranks := range []int{1, 2, 3} {
		sums := make([]float32, ranks)
		world(ranks, func(ctx context.Context, g *ddp.Gradients, own *halves, rank int, _ []*runtime.Tensor) error {
			var mine [][]byte
			for _, r := range sparse.RestoreRanks(2, ranks, rank) {
				mine = append(mine, states[r])
			}
			assert.ErrorIs(t, g.Restore(ctx, append(mine, states[0])...), comm.ErrMismatch)
			if err := g.Restore(ctx, mine...); err != nil {
				return err
			}
			kept, err := runtime.ToSlice[float32](own.residual)
			for _, x := range kept {
				sums[rank] += x
			}
			return err
		})
		sum := float32(0)
		for _, x := range sums {
			sum += x
		}
		assert.Equal(t, float32(n/2*(1+2)), sum, "%d ranks", ranks)
	}
}

// TestReducerSuite runs the suite of a program's reducer, also with streams.
func TestReducerSuite(t *testing.T) {
	newHalves := func(b ddp.Bucket) (ddp.Reducer, error) {
		residual, err := runtime.New(b.Tensor.Runtime(), dtype.F32, b.Tensor.Len())
		return &halves{residual: residual}, errors.Join(err, residual.Fill(0))
	}
	for _, device := range []string{"host", "streams", "side stream"} {
		t.Run(device, func(t *testing.T) {
			world := func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
				return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
					memory := standin.Borrow()
					r := commtest.Rank{Comm: c, Runtime: memory}
					switch device {
					case "streams":
						r = commtest.Rank{Comm: standin.NewOrdered(ctx, c), Runtime: standin.NewOnStream(memory)}
					case "side stream":
						r = commtest.Rank{Comm: standin.NewByEvents(ctx, c), Runtime: standin.NewForking(memory)}
					}
					return errors.Join(body(ctx, r), standin.Return(memory))
				})
			}
			distributedtest.RunReducer(t, commtest.Backend{Sizes: []int{1, 3}, Run: world}, newHalves)
		})
	}
}

package ddp_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// halves sends the even elements in one step and the odd ones in the next, and keeps the others.
type halves struct {
	residual, before []float32
	steps            int
	fails            error // of the next Reduce, when it has changed the residual
	ends             string
}

func (h *halves) Reduce(ctx context.Context, b ddp.Bucket) error {
	h.before = slices.Clone(h.residual)
	x, err := runtime.ToSlice[float32](b.Tensor)
	if err != nil {
		return err
	}
	for i := range x {
		x[i] += h.residual[i]
		h.residual[i] = 0
		if i%2 != h.steps%2 {
			h.residual[i], x[i] = x[i], 0
		}
	}
	h.steps++
	if err := runtime.CopyIn(b.Tensor, x); err != nil {
		return err
	}
	if h.fails != nil {
		return h.fails
	}
	return distributed.AllReduce(ctx, b.Comm, b.Tensor, comm.Avg)
}

func (h *halves) Commit() error { h.ends += "c"; return nil }

func (h *halves) RollBack() error {
	h.ends += "r"
	h.residual = h.before
	h.steps--
	return nil
}

func (h *halves) State(context.Context) ([]byte, error) {
	return binary.Append([]byte{byte(h.steps)}, binary.LittleEndian, h.residual)
}

func (h *halves) Restore(_ context.Context, states ...[]byte) error {
	h.steps = int(states[0][0])
	_, err := binary.Decode(states[0][1:], binary.LittleEndian, h.residual)
	return err
}

func (h *halves) Rebind(comm.Communicator) error { return nil }
func (h *halves) Close() error                   { h.ends += "x"; return nil }

// A program's own reducer has what other buckets have: its steps are rolled back with the others,
// skipped where a gradient is not finite, saved and restored.
func TestOwnReducer(t *testing.T) {
	errBroken := errors.New("this one is to fail")
	shapes := [][]int{{4, 5}, {7}, {40}, {3, 3}}
	for _, device := range []string{"host", "streams", "side stream"} {
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			memory := cpu.New()
			var rt runtime.Runtime = memory
			switch device {
			case "streams":
				rt, c = standin.NewOnStream(memory), standin.NewOrdered(ctx, c)
			case "side stream":
				rt, c = standin.NewBranching(memory), standin.NewByEvents(ctx, c)
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
						own = append(own, &halves{residual: make([]float32, end)})
						return own[len(own)-1], nil
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
			assert.Equal(t, "ccrrccc", own[0].ends, device)
			require.NoError(t, g.Close())
			assert.Equal(t, "ccrrcccx", own[0].ends, device)
			g = build()
			require.NoError(t, g.Restore(ctx, saved))
			load(5)
			require.NoError(t, g.ReduceAll(ctx, params))
			assert.Equal(t, after, bits(), "%s: goes on from the state", device)
			require.NoError(t, g.Close())
			standin.Free(t, params)
			return memory.Close()
		}), fmt.Sprint(device))
	}
}

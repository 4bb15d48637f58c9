package distributed_test

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
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestAll: tensors of several types and an empty one, reduced and broadcast as one
// group.
func TestAll(t *testing.T) {
	for _, ranks := range []int{1, 2, 3} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			made := &standin.Grouped{Communicator: c}
			var tensors []*runtime.Tensor
			for i, dt := range []dtype.DType{dtype.F32, dtype.I64, dtype.BF16, dtype.F64} {
				x, err := runtime.New(rt, dt, i)
				require.NoError(t, err)
				require.NoError(t, x.Fill(float64(10*i+c.Rank())))
				tensors = append(tensors, x)
			}
			values := func() (all []float64) {
				for _, x := range tensors[1:] {
					converted := make([]float64, x.Len())
					switch x.DType() {
					case dtype.I64:
						s, err := cpu.Slice[int64](x)
						require.NoError(t, err)
						for j, v := range s {
							converted[j] = float64(v)
						}
					case dtype.BF16:
						s, err := cpu.Slice[dtype.BFloat16](x)
						require.NoError(t, err)
						for j, v := range s {
							converted[j] = float64(v.Float32())
						}
					case dtype.F64:
						s, err := cpu.Slice[float64](x)
						require.NoError(t, err)
						copy(converted, s)
					}
					all = append(all, converted...)
				}
				return all
			}
			sum := func(i int) float64 { return float64(10*i*ranks + ranks*(ranks-1)/2) }

			require.NoError(t, distributed.AllReduceAll(ctx, made, tensors, comm.Sum))
			assert.Equal(t, []float64{sum(1), sum(2), sum(2), sum(3), sum(3), sum(3)}, values())

			for _, x := range tensors {
				require.NoError(t, x.Fill(float64(c.Rank())))
			}
			root := ranks - 1
			require.NoError(t, distributed.BroadcastAll(ctx, made, tensors, root))
			assert.Equal(t, slices.Repeat([]float64{float64(root)}, 6), values())
			assert.Len(t, made.Groups, 2)
			assert.NoError(t, distributed.AllReduceAll(ctx, c, nil, comm.Sum))
			standin.Free(t, tensors)
			return nil
		})
	}
}

// TestAllMisuse: one tensor that is wrong is named, and nothing is sent.
func TestAllMisuse(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		made := &standin.Grouped{Communicator: c}
		tensors := standin.Gradients(t, rt, 2)
		err := distributed.AllReduceAll(ctx, made, append(tensors[:2:2], nil), comm.Sum)
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorContains(t, err, "tensor 2")
		standin.Free(t, tensors)
		err = distributed.BroadcastAll(ctx, made, tensors, 0)
		assert.ErrorIs(t, err, runtime.ErrFreed)
		assert.ErrorIs(t, distributed.BroadcastAll(ctx, nil, nil, 0), comm.ErrArgument)
		assert.Empty(t, made.Groups)
		return nil
	})
}

// TestBytes: texts of different lengths, some empty, from and to every root.
func TestBytes(t *testing.T) {
	text := func(rank int) []byte {
		if rank == 1 {
			return nil
		}
		return []byte(fmt.Sprintf("%*d", 3000*rank+1, rank))
	}
	for _, ranks := range []int{1, 2, 3, 4} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			same := func(got [][]byte) {
				assert.Len(t, got, ranks)
				for r, b := range got {
					assert.Equal(t, string(text(r)), string(b))
				}
			}
			for root := range ranks {
				got, err := distributed.BroadcastBytes(ctx, rt, c, text(c.Rank()), root)
				require.NoError(t, err)
				assert.Equal(t, string(text(root)), string(got))

				all, err := distributed.GatherBytes(ctx, rt, c, text(c.Rank()), root)
				require.NoError(t, err)
				if c.Rank() == root {
					same(all)
				} else {
					assert.Nil(t, all)
				}
				var parts [][]byte
				for r := range ranks {
					parts = append(parts, text(r))
				}
				if c.Rank() != root {
					parts = nil
				}
				part, err := distributed.ScatterBytes(ctx, rt, c, parts, root)
				require.NoError(t, err)
				assert.Equal(t, string(text(c.Rank())), string(part))
			}
			all, err := distributed.AllGatherBytes(ctx, rt, c, text(c.Rank()))
			require.NoError(t, err)
			same(all)
			none, err := distributed.AllGatherBytes(ctx, rt, c, nil)
			require.NoError(t, err)
			assert.Len(t, none, ranks)
			assert.Empty(t, slices.Concat(none...))
			_, err = distributed.BroadcastBytes(ctx, rt, c, nil, ranks)
			assert.ErrorIs(t, err, comm.ErrArgument)
			_, err = distributed.GatherBytes(ctx, rt, nil, nil, 0)
			assert.ErrorIs(t, err, comm.ErrArgument)
			_, err = distributed.ScatterBytes(ctx, rt, c, nil, ranks)
			assert.ErrorIs(t, err, comm.ErrArgument)
			return nil
		})
	}
}

// TestAverageMetrics: averages over samples, and a rank without any.
func TestAverageMetrics(t *testing.T) {
	standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		weight := []float64{30, 10, 0}[c.Rank()]
		loss := []float64{1, 5, math.NaN()}[c.Rank()]
		got, err := distributed.AverageMetrics(ctx, rt, c, weight, loss, float64(c.Rank()))
		require.NoError(t, err)
		assert.Equal(t, []float64{2, 0.25}, got)
		got, err = distributed.AverageMetrics(ctx, rt, c, 0, loss)
		require.NoError(t, err)
		assert.True(t, math.IsNaN(got[0]))
		_, err = distributed.AverageMetrics(ctx, rt, c, -1, loss)
		assert.ErrorIs(t, err, comm.ErrArgument)
		return nil
	})
}

// TestSampler: what all ranks have together, in every way of sharing.
func TestSampler(t *testing.T) {
	for _, n := range []int{0, 1, 7, 12, 100} {
		for _, ranks := range []int{1, 3, 4} {
			for _, tail := range []struct {
				cfg  distributed.SamplerConfig
				want int // samples in all
			}{
				{cfg: distributed.SamplerConfig{}, want: (n + ranks - 1) / ranks * ranks},
				{cfg: distributed.SamplerConfig{Uneven: true}, want: n},
			} {
				for _, inOrder := range []bool{false, true} {
					cfg := tail.cfg
					cfg.Seed = 3
					cfg.InOrder = inOrder
					shares := make([][]int, ranks)
					standin.World(t, ranks, func(_ context.Context, c comm.Communicator, _ *cpu.Runtime) error {
						s, err := distributed.NewSampler(c, n, cfg)
						require.NoError(t, err)
						shares[c.Rank()] = s.Epoch(2)
						assert.Equal(t, s.Len(), len(shares[c.Rank()]))
						assert.Equal(t, shares[c.Rank()], s.Epoch(2), "again the same")
						assert.Equal(t, shares[c.Rank()], append([]int{}, slices.Concat(s.Batches(2, 3)...)...))
						if n == 100 && !inOrder {
							assert.NotEqual(t, shares[c.Rank()], s.Epoch(3))
						}
						return nil
					})
					var all []int
					for step := range len(shares[0]) { // as one rank would see them
						for _, share := range shares {
							if step < len(share) {
								all = append(all, share[step])
							}
						}
					}
					require.Len(t, all, tail.want)
					if inOrder {
						for i, x := range all {
							assert.Equal(t, i%n, x)
						}
					}
					times := make(map[int]int)
					for _, x := range all {
						times[x]++
					}
					assert.Len(t, times, n)
					for x, count := range times {
						assert.True(t, 0 <= x && x < n)
						if cfg.Uneven {
							assert.Equal(t, 1, count)
						}
					}
				}
			}
		}
	}
	_, err := distributed.NewSampler(nil, 1, distributed.SamplerConfig{})
	assert.ErrorIs(t, err, comm.ErrArgument)
	standin.World(t, 1, func(_ context.Context, c comm.Communicator, _ *cpu.Runtime) error {
		_, err := distributed.NewSampler(c, -1, distributed.SamplerConfig{})
		assert.ErrorIs(t, err, comm.ErrArgument)
		return nil
	})
}

// TestForgedLengths: a rank announces more bytes than there are.
func TestForgedLengths(t *testing.T) {
	for _, n := range []uint64{1 << 63, math.MaxUint64, 1 << 62, 1<<42 + 1} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			if c.Rank() == 0 {
				p, err := rt.Allocate(16)
				require.NoError(t, err)
				require.NoError(t, rt.CopyIn(p, binary.LittleEndian.AppendUint64(nil, n)))
				err = errors.Join(c.Broadcast(p, 1, dtype.I64, 0), c.AllGather(p, p, 1, dtype.I64), c.Sync(ctx))
				return errors.Join(err, rt.Deallocate(p))
			}
			_, err := distributed.BroadcastBytes(ctx, rt, c, nil, 0)
			assert.ErrorIs(t, err, comm.ErrMismatch)
			assert.ErrorContains(t, err, "rank 0 announces")
			_, err = distributed.AllGatherBytes(ctx, rt, c, nil)
			assert.ErrorIs(t, err, comm.ErrMismatch)
			return nil
		})
	}
}

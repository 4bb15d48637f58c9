package ddp_test

import (
	"context"
	"math/rand/v2"
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

// TestWire: gradients travel in 16 bits, rounded before and after; those of other
// types as they are.
func TestWire(t *testing.T) {
	const n, ranks = 9000, 3 // more than what is put together anyway
	const share = n * 2 * (ranks - 1) / ranks
	for _, dt := range []dtype.DType{dtype.F16, dtype.BF16} {
		t.Run(dt.String(), func(t *testing.T) {
			gradient := func(rank int) []float32 {
				rng := rand.New(rand.NewPCG(1, uint64(rank)))
				values := make([]float32, n)
				for i := range values {
					values[i] = float32(rng.NormFloat64())
				}
				return values
			}
			round := func(x float32) float32 {
				var bits [2]byte
				require.NoError(t, dtype.FromFloat32(bits[:], dt, []float32{x}))
				var out [1]float32
				require.NoError(t, dtype.ToFloat32(out[:], bits[:], dt))
				return out[0]
			}
			want := make([]float32, n)
			for rank := range ranks {
				for i, x := range gradient(rank) {
					want[i] += round(x)
				}
			}
			for i, sum := range want {
				want[i] = round(sum / ranks)
			}
			standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				values := gradient(c.Rank())
				x, err := cpu.Wrap(rt, values)
				require.NoError(t, err)
				other, err := runtime.New(rt, dtype.F64, 1)
				require.NoError(t, err)
				require.NoError(t, other.Fill(1.0/3))
				all := []*runtime.Tensor{x, other}
				g, err := ddp.New(ctx, rt, c, all, ddp.Config{Wire: dt})
				require.NoError(t, err)
				require.NoError(t, g.ReduceAll(ctx, all))
				assert.Equal(t, want, values)
				exact, err := cpu.Slice[float64](other)
				require.NoError(t, err)
				assert.InDelta(t, 1.0/3, exact[0], 1e-15)
				stats, err := g.Stats(ctx)
				require.NoError(t, err)
				assert.Equal(t, int64(share+1), stats.SentElements)
				assert.Equal(t, int64(2*share+8), stats.SentBytes)
				require.NoError(t, g.Close())
				standin.Free(t, all)
				return nil
			})
		})
	}
}

// TestWireMisuse: what is no type of 16 bits, and sparse buckets.
func TestWireMisuse(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 1)
		for _, cfg := range []ddp.Config{
			{Wire: dtype.I16},
			{Wire: dtype.BF16, Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}},
		} {
			_, err := ddp.New(ctx, rt, c, all, cfg)
			assert.ErrorIs(t, err, comm.ErrArgument)
		}
		standin.Free(t, all)
		return nil
	})
}

package engine

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/state"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestOkTopkSection3_1_1Balance is of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning",
// PPoPP 2022, section 3.1.1, split and reduce: right after partitions were balanced, a rank receives not much more than
// k entries, also if each rank's large entries cluster in another place, where the paper's boundaries do not balance.
func TestOkTopkSection3_1_1Balance(t *testing.T) {
	const ranks, n, density = 8, 50_000, 0.02
	const k = int(n * density)
	for name, place := range map[string]func(rank int) (from, to int){
		"spread":        func(int) (int, int) { return 0, n },
		"clustered":     func(int) (int, int) { return 30_000, 31_500 },
		"own clusters":  func(rank int) (int, int) { return rank * n / ranks, rank*n/ranks + 1500 },
		"two clusters":  func(rank int) (int, int) { return rank % 2 * 40_000, rank%2*40_000 + 1500 },
		"far apart one": func(rank int) (int, int) { return rank / 7 * 40_000, rank/7*40_000 + 1500 },
	} {
		rt := cpu.New()
		received := make([]int, ranks)
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			rng := rand.New(rand.NewPCG(uint64(c.Rank()), 3))
			g := make([]float32, n)
			from, to := place(c.Rank())
			for i := range g {
				g[i] = float32(rng.NormFloat64()) * 1e-4
				if i >= from && i < to {
					g[i] *= 1e4
				}
			}
			grad, err := runtime.FromSlice(rt, g, n)
			if err != nil {
				return err
			}
			s, err := New(rt, c, n, Config{Pattern: "oktopk", Density: density})
			if err != nil {
				return err
			}
			if err := s.AllReduce(ctx, grad); err != nil {
				return err
			}
			for _, l := range s.exchange.(*okExchange).sources[1:] {
				received[c.Rank()] += l.N
			}
			return errors.Join(s.Close(), grad.Free())
		}))
		assert.LessOrEqual(t, slices.Max(received), 2*k, "%s: entries received by each rank: %v, k = %d", name, received, k)
		require.NoError(t, rt.Close())
	}
}

// TestOkTopkEquation3Budget is of Li and Hoefler, PPoPP 2022, equation 3: a rank sends at most 6k(P-1)/P elements in a
// step. For all k and world sizes that use oktopk, shares of this budget are positive, and together within it.
func TestOkTopkEquation3Budget(t *testing.T) {
	for _, size := range []int{2, 3, 4, 5, 8, 31, 32, 64, 1000} {
		for k := 1; k < 100_000; k += 1 + k/50 {
			if !unit(1).roomy(k, size) {
				continue
			}
			for _, extra := range []int{unit(1).overhead(size, false, false), unit(1).overhead(size, true, false), unit(1).overhead(size, true, true)} {
				l := newLimits(k, size, extra)
				require.Positive(t, l.outgoing, "k=%d P=%d", k, size)
				require.Positive(t, l.global, "k=%d P=%d", k, size)
				require.LessOrEqual(t, l.global, k)
				require.GreaterOrEqual(t, l.global, size, "k=%d P=%d: not one entry per rank", k, size)
				require.LessOrEqual(t, 2*l.outgoing+2*l.global+extra, budget(k, size), "k=%d P=%d", k, size)
				require.LessOrEqual(t, 2*l.outgoing+l.allgather+extra, budget(k, size), "k=%d P=%d", k, size)
				require.GreaterOrEqual(t, 4*l.global, k, "k=%d P=%d: too little of the budget is left", k, size)
				if extra == unit(1).overhead(size, true, true) {
					continue
				}
				each := l.quota(k, size)
				require.LessOrEqual(t, 2*l.outgoing+2*each*(size-1)+extra, budget(k, size), "k=%d P=%d", k, size)
				l = l.spend(unit(1).reestimate(size))
				extra += unit(1).reestimate(size)
				if each >= 2*evenLength {
					require.GreaterOrEqual(t, 10*each*size, 14*k, "k=%d P=%d: less than a threshold lets pass", k, size)
					left := l.spend((size - 1) * (headerWords + 2*each))
					require.GreaterOrEqual(t, left.global, max(size, k/8), "k=%d P=%d: too little is left for a threshold that is far off", k, size)
				}
				if size > 3 {
					require.Equal(t, k, l.global, "k=%d P=%d: gtopk has k entries", k, size)
				}
				require.GreaterOrEqual(t, l.global, size, "k=%d P=%d: not one entry per rank", k, size)
				require.LessOrEqual(t, 2*l.outgoing+2*l.global+extra, budget(k, size), "k=%d P=%d", k, size)
				require.LessOrEqual(t, 2*l.outgoing+l.allgather+extra, budget(k, size), "k=%d P=%d", k, size)
				require.GreaterOrEqual(t, 5*l.global, k, "k=%d P=%d: too little of the budget is left", k, size)
			}
		}
	}
}

func TestCorrect(t *testing.T) {
	assert.Equal(t, float32(1), correct(1, 100, 100, 2))
	assert.Equal(t, float32(1), correct(1, 125, 100, 2))
	assert.Equal(t, float32(1), correct(1, 67, 100, 2))
	assert.Equal(t, float32(2), correct(1, 126, 100, 2))
	assert.Equal(t, float32(0.5), correct(1, 66, 100, 2))
	assert.Equal(t, float32(tiny), correct(tiny, 0, 100, 2), "a threshold stays above zero")
}

// TestGaussiankThreshold is of Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019: a
// threshold that is fitted to a normal distribution, and corrected, selects about k entries. It is tried
// on distributions with tails of all weights.
func TestGaussiankThreshold(t *testing.T) {
	const n, k = 50_000, 500
	for name, draw := range map[string]func(rng *rand.Rand) float64{
		"normal":     func(rng *rand.Rand) float64 { return rng.NormFloat64() },
		"shifted":    func(rng *rand.Rand) float64 { return rng.NormFloat64() + 3 },
		"uniform":    func(rng *rand.Rand) float64 { return rng.Float64() - 0.5 },
		"laplace":    func(rng *rand.Rand) float64 { return rng.ExpFloat64() * float64(rng.IntN(2)*2-1) },
		"heavy tail": func(rng *rand.Rand) float64 { return math.Pow(1-rng.Float64(), -3) },
	} {
		rt := cpu.New()
		require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
			rng := rand.New(rand.NewPCG(4, 4))
			g := make([]float32, n)
			for i := range g {
				g[i] = float32(draw(rng))
			}
			grad, err := runtime.FromSlice(rt, g, n)
			if err != nil {
				return err
			}
			s, err := New(rt, c, n, Config{Pattern: "gaussiank", Density: float64(k) / n})
			if err != nil {
				return err
			}
			if err := s.AllReduce(ctx, grad); err != nil {
				return err
			}
			stats, err := s.Stats(ctx)
			if err != nil {
				return err
			}
			selected := stats.SelectedLocal
			assert.True(t, selected >= 3*k/4 && selected <= 5*k/4, "%s: %d selected, want about %d", name, selected, k)
			return errors.Join(s.Close(), grad.Free())
		}))
		require.NoError(t, rt.Close())
	}
}

// TestStateOfNoRanks: a state that is whole, and says that it is of a world without ranks, is refused.
func TestStateOfNoRanks(t *testing.T) {
	for _, pattern := range []string{sparsity.TopkA, sparsity.Oktopk} {
		rt := cpu.New()
		s, err := New(rt, noop.New(rt), 1000, Config{Pattern: pattern, Density: 0.1})
		require.NoError(t, err)
		saved, err := s.State(t.Context())
		require.NoError(t, err)
		p, err := s.parse(saved)
		require.NoError(t, err)
		e := state.NewEncoder(kind, 0)
		e.Uint64(p.fingerprint)
		e.Int(0)
		e.Int(0)
		e.Int(p.steps)
		e.Int(100)
		for range 3 {
			e.Int(0)
		}
		e.Bool(false)
		e.Float32(0)
		e.Extend(base.WordSize * (len(p.numbers) - 1))
		e.Bytes(nil)
		assert.ErrorIs(t, s.Restore(t.Context(), e.Seal()), comm.ErrArgument)
		require.NoError(t, errors.Join(s.Close(), rt.Close()))
	}
}

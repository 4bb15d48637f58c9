package engine

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Dense wins where what is faster is faster by less than a twentieth.
func TestAutoPrefersDense(t *testing.T) {
	for dense, want := range map[float64]string{99: sparsity.Dense, 104: sparsity.Dense, 106: sparsity.Gtopk} {
		choice := choiceOf([]Trial{{Pattern: sparsity.TopkA}, {Pattern: sparsity.Gtopk}, {Pattern: sparsity.Oktopk}, {Pattern: sparsity.Dense}}, []float64{101, 100, 300, dense}, 10, 1)
		assert.Equal(t, want, choice.Pattern, "%v", dense)
		assert.Equal(t, sparsity.Oktopk, choice.Trials[3].Pattern, "the slowest")
	}
}

// Trials begin where training arrives after many steps: with thresholds that serve
// from one step to the next. The reference gets there step by step.
func TestTrialsBeginSettled(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 1800 steps, which other tests make under the race detector")
	}
	const ranks, n, density, steps = 3, 6000, 0.02, 600
	for _, name := range []string{sparsity.TopkA, sparsity.TopkAopt, sparsity.Oktopk} {
		var arrived, began [ranks]float64
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) (err error) {
			rt := cpu.New()
			rng := rand.New(rand.NewPCG(7, uint64(c.Rank())))
			g, e := runtime.New(rt, dtype.F32, n)
			if e != nil {
				return e
			}
			values := make([]float32, n)
			threshold := func(s *Reducer, steps int) float64 {
				sum := 0.0
				for step := range steps {
					for i := range values {
						values[i] = float32(rng.NormFloat64())
					}
					err = errors.Join(err, runtime.CopyIn(g, values), s.AllReduce(ctx, g))
					stats, e := s.Stats(ctx)
					err = errors.Join(err, e)
					if steps-step <= 5 {
						sum += float64(stats.Threshold) / 5
					}
				}
				return sum
			}
			cfg := Config{Pattern: name, Density: density}
			trained, e := New(rt, c, n, cfg)
			if e != nil {
				return e
			}
			fresh, e := New(rt, c, n, cfg)
			if e != nil {
				return e
			}
			p := &probe{rt: rt, rng: rng}
			err = p.warmUp(fresh)
			arrived[c.Rank()], began[c.Rank()] = threshold(trained, steps), threshold(fresh, 5)
			return errors.Join(err, trained.Close(), fresh.Close(), g.Free(), rt.Close())
		}))
		for rank := range ranks {
			assert.InEpsilon(t, arrived[rank], began[rank], 0.2, "%s, rank %d", name, rank)
		}
	}
}

// Ranks disagree if auto has chosen the pattern on one, and the program on another: only the first one has a residual
// of the dense pattern, for example.
func TestChoiceOfOneRank(t *testing.T) {
	for _, chosen := range []bool{false, true} {
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			rt := cpu.New()
			g, err := runtime.New(rt, dtype.F32, 100)
			require.NoError(t, err)
			s, err := New(rt, c, 100, Config{Pattern: sparsity.TopkA, Density: 0.1})
			require.NoError(t, err)
			s.cfg.chosen = chosen && c.Rank() == 0
			err = s.AllReduce(ctx, g)
			if chosen {
				require.ErrorIs(t, err, comm.ErrMismatch)
				require.ErrorContains(t, err, "chosen by auto")
			} else {
				require.NoError(t, err)
			}
			return errors.Join(s.Close(), g.Free())
		}))
	}
}

package sparse

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// racers are named after patterns, each with the times of its rounds.
func racers(times map[string][]float64) (all []*racer) {
	for _, name := range Patterns() { // in a fixed order
		if t := times[name]; t != nil {
			all = append(all, &racer{result: &Trial{Pattern: name}, times: t, every: 32})
		}
	}
	return all
}

func namesOf(racing []*racer) (names []string) {
	for _, r := range racing {
		names = append(names, r.result.Pattern)
	}
	return names
}

// The farther a pattern is behind, the earlier it is out, whatever single rounds do.
func TestAutoDropsPatterns(t *testing.T) {
	times := map[string][]float64{
		TopkA:    {10, 90, 90, 10}, // held up twice
		TopkAopt: {11, 11, 11, 11},
		Gtopk:    {13, 13, 13, 13},
		Oktopk:   {16, 2, 16, 16}, // lucky once
	}
	all := racers(times)
	assert.Len(t, stillRacing(racers(times), 3), 4, "too early")
	assert.Len(t, stillRacing(racers(times), 5), 4, "not now")
	assert.Equal(t, []string{TopkA, TopkAopt, Gtopk}, namesOf(stillRacing(racers(times), 4)))
	assert.Equal(t, []string{TopkA, TopkAopt}, namesOf(stillRacing(racers(times), 8)))
	assert.Equal(t, []string{TopkA, TopkAopt}, namesOf(stillRacing(racers(times), 16)))
	assert.Equal(t, []string{TopkA}, namesOf(stillRacing(racers(times), 32)))
	assert.Equal(t, TopkA, winner(all))
}

// Steps in which thresholds are found anew count with their share.
func TestAutoCountsThresholds(t *testing.T) {
	all := racers(map[string][]float64{TopkA: {10, 10, 10, 10}, Oktopk: {9, 9, 9, 9}})
	for _, r := range all {
		r.anew = r.times[0]
	}
	assert.Equal(t, Oktopk, winner(all))
	all[1].anew = 9 + 2*32
	assert.InDelta(t, 11, all[1].seconds(), 1e-9)
	assert.Equal(t, TopkA, winner(all))
}

// Dense wins where what is faster is faster by less than a twentieth.
func TestAutoPrefersDense(t *testing.T) {
	for dense, want := range map[float64]string{99: Dense, 104: Dense, 106: TopkA} {
		assert.Equal(t, want, winner(racers(map[string][]float64{Dense: {dense}, TopkA: {100}, Gtopk: {101}})), "%v", dense)
	}
}

// Trials begin where training arrives after many steps: with thresholds that serve
// from one step to the next. The reference gets there step by step.
func TestTrialsBeginSettled(t *testing.T) {
	const ranks, n, density, steps = 3, 6000, 0.02, 600
	for _, name := range []string{TopkA, TopkAopt, TopkA2, Oktopk} {
		var arrived, began [ranks]float64
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) (err error) {
			rt := cpu.New()
			cfg := Config{Pattern: name, Density: density}
			threshold := func(s *Reducer, steps int, refresh func() error, g *runtime.Tensor) float64 {
				sum := 0.0
				for step := range steps {
					err = errors.Join(err, refresh(), s.AllReduce(ctx, g))
					stats, e := s.Stats(ctx)
					err = errors.Join(err, e)
					if steps-step <= 5 {
						sum += float64(stats.Threshold) / 5
					}
				}
				return sum
			}
			g, e := runtime.New(rt, dtype.F32, n)
			if e != nil {
				return e
			}
			s, e := New(rt, c, n, cfg)
			if e != nil {
				return e
			}
			rng := rand.New(rand.NewPCG(7, uint64(c.Rank())))
			values := make([]float32, n)
			arrived[c.Rank()] = threshold(s, steps, func() error {
				for i := range values {
					values[i] = float32(rng.NormFloat64())
				}
				return runtime.CopyIn(g, values)
			}, g)

			p := &probe{ctx: ctx, rt: rt, c: c, cfg: cfg, dt: dtype.F32, n: n, k: count(density, n)}
			if err := p.allocate(); err != nil {
				return err
			}
			trial, e := p.newTrial(name, n)
			if e != nil {
				return e
			}
			began[c.Rank()] = threshold(trial.sparse, 5, trial.refresh, trial.gradient)
			return errors.Join(err, trial.close(), p.close(), s.Close(), g.Free(), rt.Close())
		}))
		for rank := range ranks {
			assert.InEpsilon(t, arrived[rank], began[rank], 0.2, "%s, rank %d", name, rank)
		}
		t.Logf("%s: %.2f after %d steps, %.2f in the first", name, arrived, steps, began)
	}
}

// A threshold that is found anew has the old one for a guess, as in training, where it
// is found anew after so many steps.
func TestFindAnewWithAGuess(t *testing.T) {
	const ranks, n, density = 2, 6000, 0.05
	for _, name := range []string{TopkA, TopkAopt, Oktopk} {
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			rt := cpu.New()
			p := &probe{ctx: ctx, rt: rt, c: c, cfg: Config{Pattern: name, Density: density}, dt: dtype.F32, n: n, k: count(density, n)}
			if err := p.allocate(); err != nil {
				return err
			}
			trial, err := p.newTrial(name, n)
			if err != nil {
				return err
			}
			s := trial.sparse
			for range 3 {
				_, e := trial.step()
				err = errors.Join(err, e)
			}
			s.read(ctx)
			guess, age := s.float(numState), s.host[numState+1]
			assert.Positive(t, guess, name)
			trial.findAnew()
			s.read(ctx)
			assert.Equal(t, guess, s.float(numState), name)
			_, e := trial.step()
			s.read(ctx)
			if name == TopkA {
				assert.InEpsilon(t, math.Float32frombits(uint32(age)), s.float(numState+1), 0.5, "its margin")
			} else {
				assert.Equal(t, int32(2), age, "%s: steps with this threshold", name)
				assert.Zero(t, s.host[numState+1], "%s: found anew", name)
			}
			return errors.Join(err, e, trial.close(), p.close(), rt.Close())
		}))
	}
}

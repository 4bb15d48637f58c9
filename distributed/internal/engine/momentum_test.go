package engine_test

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// momentumGradient is rank's gradient in a step.
func momentumGradient(rank, step, n int) []float32 {
	rng := rand.New(rand.NewPCG(uint64(rank), uint64(step)))
	g := make([]float32, n)
	for i := range g {
		g[i] = float32(rng.NormFloat64())
	}
	return g
}

// TestDGCSection3_2Momentum is of Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.2, momentum correction,
// and section 3.3, momentum factor masking: velocities and selected entries are those of a simulation, to the last bit,
// after a dense warm-up.
func TestDGCSection3_2Momentum(t *testing.T) {
	const n, ranks, k, warmup, steps = 50, 3, 5, 2, 8
	const momentum = 0.75
	velocity, residual := make([][]float32, ranks), make([][]float32, ranks)
	for r := range ranks {
		velocity[r], residual[r] = make([]float32, n), make([]float32, n)
	}
	var want [steps][]float32
	scale := 1 / float32(ranks)
	for step := range steps {
		want[step] = make([]float32, n)
		for r := range ranks {
			v, x := velocity[r], residual[r]
			for i, g := range momentumGradient(r, step, n) {
				product := momentum * v[i]
				v[i] = product + g
			}
			if step < warmup {
				for i := range v {
					want[step][i] += v[i] / ranks
				}
				continue
			}
			order := make([]int, n)
			for i := range order {
				order[i] = i
				x[i] += v[i]
			}
			slices.SortStableFunc(order, func(a, b int) int {
				if d := math.Abs(float64(x[b])) - math.Abs(float64(x[a])); d != 0 {
					return int(math.Copysign(1, d))
				}
				return 0
			})
			for _, i := range order[:k] {
				product := x[i] * scale
				want[step][i] += product
				x[i], v[i] = 0, 0
			}
		}
	}
	for _, noUndo := range []bool{false, true} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			s, err := engine.New(rt, c, n, engine.Config{Pattern: sparsity.TopkA, Density: float64(k) / n,
				Momentum: momentum, NoUndo: noUndo, Schedule: engine.Schedule{WarmupSteps: warmup}})
			require.NoError(t, err)
			for step := range steps {
				got := momentumGradient(c.Rank(), step, n)
				x, err := cpu.Wrap(rt, got)
				require.NoError(t, err)
				require.NoError(t, s.AllReduce(ctx, x))
				require.NoError(t, x.Free())
				if step < warmup {
					assert.InDeltaSlice(t, want[step], got, 1e-6)
				} else {
					assert.Equal(t, want[step], got, "step %d", step)
				}
			}
			return s.Close()
		})
	}
}

// TestMomentumTransaction: with every pattern, a step that is skipped leaves
// velocities as they were, and so does one that goes on from a saved state.
func TestMomentumTransaction(t *testing.T) {
	const n, ranks, steps = 300, 3, 6
	for _, pattern := range append(sparsity.Patterns(), sparsity.Auto) {
		t.Run(pattern, func(t *testing.T) {
			cfg := engine.Config{Pattern: pattern, Density: 0.1, Momentum: 0.9, NonFinite: engine.SkipNonFinite,
				Schedule: engine.Schedule{WarmupSteps: 2}}
			if pattern == sparsity.Auto {
				cfg.Density = 0.6 // so that it always chooses the same, dense
			}
			train := func(bad, resumed int) [][]float32 {
				results := make([][]float32, 0, steps)
				standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
					s, err := engine.New(rt, c, n, cfg)
					require.NoError(t, err)
					reduce := func(g []float32) {
						x, err := cpu.Wrap(rt, g)
						require.NoError(t, err)
						require.NoError(t, s.AllReduce(ctx, x))
						require.NoError(t, x.Free())
					}
					for step := range steps {
						if step == resumed {
							state, err := s.State(ctx)
							require.NoError(t, err)
							require.NoError(t, s.Close())
							s, err = engine.New(rt, c, n, cfg)
							require.NoError(t, err)
							require.NoError(t, s.Restore(ctx, state))
						}
						g := momentumGradient(c.Rank(), step, n)
						if step == bad && c.Rank() == 1 {
							g[7] = float32(math.NaN())
						}
						reduce(g)
						if step == bad {
							assert.Equal(t, make([]float32, n), g)
						} else if c.Rank() == 0 {
							results = append(results, g)
						}
					}
					return s.Close()
				})
				return results
			}
			through := train(-1, -1)
			for _, step := range []int{1, 3} {
				assert.Equal(t, through, train(-1, step), "saved before step %d", step)
				// A skipped step changes nothing but the schedule.
				skippedLast := train(step, -1)
				assert.Equal(t, through[:step], skippedLast[:step])
				assert.Len(t, skippedLast, steps-1)
				for _, result := range skippedLast {
					assert.False(t, slices.ContainsFunc(result, func(x float32) bool { return x != x }), "no NaN is left in a velocity")
				}
			}
		})
	}
}

// TestMomentumMisuse: what is no momentum, and without error feedback.
func TestMomentumMisuse(t *testing.T) {
	standin.World(t, 1, func(_ context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		for _, cfg := range []engine.Config{{Momentum: 1}, {Momentum: -0.1}, {Momentum: math.NaN()},
			{Pattern: sparsity.TopkA, Density: 0.1, Momentum: 0.9, NoErrorFeedback: true}} {
			_, err := engine.New(rt, c, 10, cfg)
			assert.ErrorIs(t, err, comm.ErrArgument)
		}
		return nil
	})
}

// TestDenseVelocity: velocities of F16 gradients outgrow the type in dense steps, too. The part that results have no
// room for comes later, and nothing is skipped.
func TestDenseVelocity(t *testing.T) {
	const n, steps, warmup, value, momentum, largest = 40, 60, 20, 8000, 0.9, 65504
	for _, cfg := range []engine.Config{
		{Momentum: momentum, NonFinite: engine.SkipNonFinite},
		{Pattern: "topkA", Density: 1, Momentum: momentum, Schedule: engine.Schedule{WarmupSteps: warmup}},
	} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			s, err := engine.New(rt, c, n, cfg)
			require.NoError(t, err)
			g, err := runtime.New(rt, dtype.F16, n)
			require.NoError(t, err)
			var velocity, in, out float64
			for step := range steps {
				x := float64(value)
				if step >= steps/2 {
					x = 0 // what is left comes out
				}
				require.NoError(t, errors.Join(g.Fill(x), s.AllReduce(ctx, g)))
				stats, err := s.Stats(ctx)
				require.NoError(t, err)
				assert.False(t, stats.Skipped, "step %d", step)
				if velocity = momentum*velocity + x; step >= warmup && cfg.Pattern == "topkA" {
					velocity = x // what was sent before is masked, but for the first time
					if step == warmup {
						velocity = 0
						for range warmup {
							velocity = momentum*velocity + x
						}
						velocity = momentum*velocity + x
					}
				}
				in += velocity
				got := make([]byte, 2*n)
				ptr, err := g.Ptr()
				require.NoError(t, errors.Join(err, rt.CopyOut(got, ptr)))
				values := make([]float32, n)
				require.NoError(t, dtype.ToFloat32(values, got, dtype.F16))
				require.LessOrEqual(t, values[3], float32(largest))
				out += float64(values[3])
			}
			assert.InEpsilon(t, in, out, 1e-3, "%+v", cfg)
			return errors.Join(s.Close(), g.Free())
		})
	}
}

// TestVelocityOtherWorld saves a run with momentum and goes on with fewer and with
// more ranks: the mean of the velocities and the sum of the residuals stay, and
// every rank has a velocity.
func TestVelocityOtherWorld(t *testing.T) {
	const n, steps = 500, 4
	cfg := engine.Config{Pattern: "topkA", Density: 0.1, Momentum: 0.9}
	// sums are of the residuals and the velocities in states of all ranks.
	sums := func(states [][]byte) (residual, velocity []float64) {
		residual, velocity = make([]float64, n), make([]float64, n)
		for rank, state := range states {
			values := state[len(state)-4-8*n:]
			most := 0.0
			for i := range n {
				residual[i] += float64(math.Float32frombits(binary.LittleEndian.Uint32(values[4*i:])))
				v := float64(math.Float32frombits(binary.LittleEndian.Uint32(values[4*(n+i):])))
				velocity[i] += v
				most = max(most, math.Abs(v))
			}
			assert.Positive(t, most, "rank %d of %d has no velocity", rank, len(states))
		}
		return residual, velocity
	}
	for _, saved := range []int{2, 5} {
		states := make([][]byte, saved)
		standin.World(t, saved, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			u, err := standin.NewTrainee(rt, c, cfg, n)
			for step := range steps {
				if err == nil {
					err = u.Step(ctx, step)
				}
			}
			if err != nil {
				return err
			}
			states[c.Rank()], err = u.S.State(ctx)
			return errors.Join(err, u.Close())
		})
		residual, velocity := sums(states)
		for _, size := range []int{1, 2, 3, 4, 7} {
			again := make([][]byte, size)
			standin.World(t, size, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				u, err := standin.NewTrainee(rt, c, cfg, n)
				if err != nil {
					return err
				}
				var mine [][]byte
				for _, r := range engine.RestoreRanks(saved, size, c.Rank()) {
					mine = append(mine, states[r])
				}
				if err := u.S.Restore(ctx, mine...); err != nil {
					return err
				}
				again[c.Rank()], err = u.S.State(ctx)
				return errors.Join(err, u.Step(ctx, steps), u.Close())
			})
			r, v := sums(again)
			for i := range n {
				assert.InDelta(t, residual[i], r[i], 1e-5*(1+math.Abs(residual[i])), "%d to %d ranks, index %d", saved, size, i)
				want := velocity[i] / float64(saved)
				assert.InDelta(t, want, v[i]/float64(size), 1e-5*(1+math.Abs(want)), "%d to %d ranks, index %d", saved, size, i)
			}
		}
	}
}

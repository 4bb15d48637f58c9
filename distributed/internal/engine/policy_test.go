package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// candidates are the patterns that Auto may choose among three ranks.
var candidates = []string{sparsity.Dense, sparsity.TopkA, sparsity.TopkAopt, sparsity.Gtopk, sparsity.Oktopk}

// eachChoice runs body with a trainee of three ranks whose Auto chooses each candidate, on the host and on a device with
// streams. faults fails the call that it is told to.
func eachChoice(t *testing.T, cfg engine.Config, n int, body func(ctx context.Context, c comm.Communicator, u *standin.Trainee, faults *standin.Faulty)) {
	cfg.Pattern = sparsity.Auto
	for _, pattern := range candidates {
		for _, streams := range []bool{false, true} {
			if streams && pattern == sparsity.TopkAopt { // whose calls are those of topkA there, so that none can be preferred
				continue
			}
			if pattern == sparsity.Oktopk && (cfg.Values == sparsity.I8 || cfg.Momentum > 0) { // it is no candidate, or has calls of others
				continue
			}
			t.Run(fmt.Sprintf("%s/streams=%v", pattern, streams), func(t *testing.T) {
				standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
					memory := runtime.Runtime(rt)
					if streams {
						memory, c = standin.NewOnStream(rt), standin.NewOrdered(ctx, c)
					}
					faults := standin.NewFaulty(c)
					u, err := standin.NewTrainee(memory, standin.Prefer(faults, pattern), cfg, n)
					require.NoError(t, err)
					body(ctx, c, u, faults)
					stats, err := u.S.Stats(ctx)
					require.NoError(t, err)
					require.Equal(t, pattern, stats.Chosen, "%v", u.S.Choice().Trials)
					return u.Close()
				})
			})
		}
	}
}

// The effect of a number that is not finite, on one rank, on a step follows from the configuration, whatever was
// chosen; so does the state after a failed step.
func TestAutoPolicies(t *testing.T) {
	const n, bad = 4000, 77
	values := []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)), -math.MaxFloat32, math.MaxFloat32 / 3}
	for name, cfg := range map[string]engine.Config{
		"default": {}, "fail": {NonFinite: engine.FailNonFinite}, "i8": {Values: sparsity.I8}, "momentum": {Momentum: 0.9},
		"clipped": {ClipNorm: 1}, "clipped by all": {ClipNorm: 1, ClipGlobal: true}, // which makes large numbers small
	} {
		t.Run(name, func(t *testing.T) {
			cfg.Density = 0.02
			policy := cfg.NonFinite
			eachChoice(t, cfg, n, func(ctx context.Context, c comm.Communicator, u *standin.Trainee, _ *standin.Faulty) {
				require.NoError(t, u.Step(ctx, 0))
				for _, value := range values {
					if cfg.ClipNorm > 0 && !math.IsInf(float64(value), 0) && value == value {
						continue
					}
					g := u.Gradient(1)
					if c.Rank() == 1 {
						g[bad] = value
					}
					require.NoError(t, runtime.CopyIn(u.T, g))
					before, given := u.State(), standin.Bits(u.T)
					err := u.S.AllReduce(ctx, u.T)
					stats, statsErr := u.S.Stats(ctx)
					require.NoError(t, statsErr)
					standin.SameBits(t, before, u.State(), "%v", value)
					if policy == engine.FailNonFinite {
						assert.ErrorIs(t, err, engine.ErrNonFinite, "%v", value)
						standin.SameBits(t, given, standin.Bits(u.T), "%v", value)
						assert.Equal(t, 0, stats.Step)
						continue
					}
					assert.NoError(t, err)
					assert.True(t, stats.Skipped, "%v", value)
					standin.SameBits(t, make([]uint32, n), standin.Bits(u.T), "%v", value)
				}
			})
		})
	}
}

// Without undo, numbers that are not finite pass with every choice.
func TestAutoPassesWithoutUndo(t *testing.T) {
	eachChoice(t, engine.Config{Density: 0.02, NoUndo: true}, 4000, func(ctx context.Context, c comm.Communicator, u *standin.Trainee, _ *standin.Faulty) {
		require.NoError(t, u.Step(ctx, 0))
		g := u.Gradient(1)
		if c.Rank() == 1 {
			g[77] = float32(math.NaN())
		}
		require.NoError(t, errors.Join(runtime.CopyIn(u.T, g), u.S.AllReduce(ctx, u.T)))
		stats, err := u.S.Stats(ctx)
		require.NoError(t, err)
		assert.False(t, stats.Skipped)
		result, err := runtime.ToSlice[float32](u.T)
		require.NoError(t, err)
		assert.True(t, math.IsNaN(float64(result[77])))
		assert.False(t, math.IsNaN(float64(result[76])))
	})
}

// A step that fails leaves gradient and residual as they were, with every choice, and can be repeated.
func TestAutoFailedSteps(t *testing.T) {
	eachChoice(t, engine.Config{Density: 0.02}, 4000, func(ctx context.Context, c comm.Communicator, u *standin.Trainee, faults *standin.Faulty) {
		require.NoError(t, u.Step(ctx, 0))
		require.NoError(t, u.Load(1))
		before, given := u.State(), standin.Bits(u.T)
		faults.Calls, faults.At = 0, 0
		require.ErrorIs(t, u.S.AllReduce(ctx, u.T), standin.ErrFault)
		assert.Equal(t, before, u.State())
		assert.Equal(t, given, standin.Bits(u.T))
		require.NoError(t, u.S.AllReduce(ctx, u.T))
	})
}

// Every choice has a residual, which its states have too, and refuses results as lists.
func TestAutoKeepsAlike(t *testing.T) {
	const n = 4000
	for _, values := range []string{sparsity.F32, sparsity.I8} {
		var size int // of a state
		eachChoice(t, engine.Config{Density: 0.02, Values: values}, n, func(ctx context.Context, c comm.Communicator, u *standin.Trainee, _ *standin.Faulty) {
			require.NoError(t, u.Step(ctx, 0))
			residual, err := u.S.Residual()
			require.NoError(t, err)
			assert.Equal(t, n, residual.Len())
			state, err := u.S.State(ctx)
			require.NoError(t, err)
			if c.Rank() == 0 {
				if size == 0 {
					size = len(state)
				}
				assert.Equal(t, size, len(state))
			}
			_, err = u.S.Entries()
			assert.ErrorIs(t, err, comm.ErrUnsupported)
			assert.ErrorIs(t, u.S.AddResult(u.T, 1), comm.ErrUnsupported)
		})
	}
}

// In an epoch of density 0 nothing is sent, with every choice: gradients add up, and the steps behind it send them. The
// reference adds up what the ranks gave, and what they got.
func TestAutoPauses(t *testing.T) {
	const n, ranks, paused, steps = 4000, 3, 2, 4
	cfg := engine.Config{Density: 0.02, Schedule: engine.Schedule{WarmupSteps: 1, Densities: []float64{0}, StepsPerEpoch: paused}}
	eachChoice(t, cfg, n, func(ctx context.Context, c comm.Communicator, u *standin.Trainee, _ *standin.Faulty) {
		sums := make([]float64, n) // of results and, in the end, of residuals
		for step := range steps {
			require.NoError(t, u.Step(ctx, step))
			stats, err := u.S.Stats(ctx)
			require.NoError(t, err)
			if pausing := step >= 1 && step < 1+paused; pausing {
				assert.Zero(t, stats.K)
				assert.Empty(t, stats.Pattern)
				standin.SameBits(t, make([]uint32, n), standin.Bits(u.T), "step %d", step)
			}
			result, err := runtime.ToSlice[float32](u.T)
			require.NoError(t, err)
			for i, x := range result {
				sums[i] += float64(x)
			}
		}
		residual, err := u.S.Residual()
		require.NoError(t, err)
		all, err := runtime.New(residual.Runtime(), dtype.F32, ranks, n)
		require.NoError(t, err)
		require.NoError(t, errors.Join(distributed.AllGather(ctx, c, all, residual), c.Sync(ctx)))
		rests, err := runtime.ToSlice[float32](all)
		require.NoError(t, errors.Join(err, all.Free()))
		want := make([]float64, n)
		for rank := range ranks {
			for step := range steps {
				for i, x := range standin.Normal(n, rank, step) {
					want[i] += float64(x) / ranks
				}
			}
			for i := range sums {
				sums[i] += float64(rests[rank*n+i]) / ranks
			}
		}
		assert.InDeltaSlice(t, want, sums, 1e-5)
	})
}

// A state of a program's dense pattern has other semantics than the state of Auto that has chosen it: neither
// continues with the other. One of a sparse pattern has the same.
func TestAutoRestoresAlike(t *testing.T) {
	const n = 4000
	for pattern, alike := range map[string]bool{sparsity.Dense: false, sparsity.TopkA: true} {
		for _, policy := range []engine.NonFinitePolicy{0, engine.SkipNonFinite} {
			standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				cfg := engine.Config{Pattern: pattern, Density: 0.02, NonFinite: policy}
				program, err := standin.NewTrainee(rt, c, cfg, n)
				require.NoError(t, err)
				cfg.Pattern = sparsity.Auto
				auto, err := standin.NewTrainee(rt, standin.Prefer(c, pattern), cfg, n)
				require.NoError(t, err)
				require.NoError(t, errors.Join(program.Step(ctx, 0), auto.Step(ctx, 0)))
				for _, pair := range [][2]*standin.Trainee{{program, auto}, {auto, program}} {
					state, err := pair[0].S.State(ctx)
					require.NoError(t, err)
					err = pair[1].S.Restore(ctx, state)
					if alike {
						assert.NoError(t, err)
					} else {
						assert.ErrorIs(t, err, comm.ErrMismatch, "policy %d", policy)
					}
				}
				return errors.Join(program.Close(), auto.Close())
			})
		}
	}
}

package engine_test

import (
	"context"
	"errors"
	"math"
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

// TestOverflowWhileNothingIsSent gives one rank a gradient that later steps could not
// send, in an epoch in which gradients only add up: that rank goes without it, and no
// step after the epoch is skipped. The reference is a run in which it is zero.
func TestOverflowWhileNothingIsSent(t *testing.T) {
	const ranks, n, bad, steps = 3, 1500, 1, 5
	limit := float32(math.MaxFloat32) / ranks
	for _, pattern := range sparsity.Patterns()[1:] {
		for name, value := range map[string]float32{"the least": limit, "the largest": -math.MaxFloat32, "infinite": float32(math.Inf(1))} {
			for _, policy := range []engine.NonFinitePolicy{engine.SkipNonFinite, engine.FailNonFinite} {
				run := func(spoil, streams bool) (all [ranks][]uint64) {
					standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
						rank, memory := c.Rank(), runtime.Runtime(rt)
						if streams { // then the device judges
							memory, c = standin.NewOnStream(rt), standin.NewOrdered(ctx, c)
						}
						u, err := standin.NewTrainee(memory, c, engine.Config{Pattern: pattern, Density: 0.1, NonFinite: policy,
							Schedule: engine.Schedule{Densities: []float64{0}, StepsPerEpoch: bad + 2}}, n)
						if err != nil {
							return err
						}
						for step := range steps {
							g := u.Gradient(step)
							if step == bad && rank == 1 {
								clear(g)
								if spoil {
									g[n/2] = value
								}
							}
							if err := errors.Join(runtime.CopyIn(u.T, g), u.S.AllReduce(ctx, u.T)); err != nil {
								return err
							}
							stats, err := u.S.Stats(ctx)
							if err != nil {
								return err
							}
							assert.Equal(t, spoil && step == bad && rank == 1, stats.Skipped, "%s, %s, rank %d, step %d", pattern, name, rank, step)
							all[rank] = append(all[rank], standin.Digest(standin.Bits(u.T), u.State()))
						}
						return u.Close()
					})
					return all
				}
				for _, streams := range []bool{false, true} {
					assert.Equal(t, run(false, streams), run(true, streams), "%s, %s", pattern, name)
				}
			}
		}
	}
}

// Where a gradient that is not finite spoils the norm that clips all ranks, all of them skip the step,
// in an epoch that sends nothing as well: otherwise the others would add theirs unclipped.
func TestGlobalNormIsNotFinite(t *testing.T) {
	const ranks, n, bad = 3, 500, 1
	for _, streams := range []bool{false, true} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			rank, memory := c.Rank(), runtime.Runtime(rt)
			if streams {
				memory, c = standin.NewOnStream(rt), standin.NewOrdered(ctx, c)
			}
			u, err := standin.NewTrainee(memory, c, engine.Config{Pattern: sparsity.TopkA, Density: 0.1, ClipNorm: 1, ClipGlobal: true,
				Schedule: engine.Schedule{Densities: []float64{0}, StepsPerEpoch: bad + 2}}, n)
			if err != nil {
				return err
			}
			for step := range bad + 3 {
				g, before := u.Gradient(step), u.State()
				if step == bad && rank == 1 {
					g[7] = float32(math.NaN())
				}
				if err := errors.Join(runtime.CopyIn(u.T, g), u.S.AllReduce(ctx, u.T)); err != nil {
					return err
				}
				stats, err := u.S.Stats(ctx)
				if err != nil {
					return err
				}
				assert.Equal(t, step == bad, stats.Skipped, "streams %v, rank %d, step %d", streams, rank, step)
				if step == bad {
					standin.SameBits(t, before, u.State(), "streams %v, rank %d", streams, rank)
				}
			}
			return u.Close()
		})
	}
}

// TestSaturation reduces gradients of 1000 everywhere as F16: what adds up in the
// residuals while other entries are sent is soon beyond the largest F16. Results
// are the largest number then, and the rest stays in the residuals: nothing gets
// lost but what results are rounded by.
func TestSaturation(t *testing.T) {
	const ranks, n, steps, value, largest = 3, 300, 150, 1000, 65504
	for _, pattern := range sparsity.Patterns()[1:] {
		var l ledger
		seen := false
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			s, err := engine.New(rt, c, n, engine.Config{Pattern: pattern, Density: 0.01})
			if err != nil {
				return err
			}
			g, err := runtime.New(rt, dtype.F16, n)
			if err != nil {
				return err
			}
			result, values := make([]byte, 2*n), make([]float32, n)
			sums := make([]float64, n)
			for step := range steps {
				if err := errors.Join(g.Fill(value), s.AllReduce(ctx, g)); err != nil {
					return err
				}
				ptr, err := g.Ptr()
				if err := errors.Join(err, rt.CopyOut(result, ptr), dtype.ToFloat32(values, result, dtype.F16)); err != nil {
					return err
				}
				for i, v := range values {
					if math.IsInf(float64(v), 0) {
						assert.Fail(t, "infinite", "%s, step %d, index %d", pattern, step, i)
					}
					l.mu.Lock()
					seen = seen || v == largest
					l.mu.Unlock()
					sums[i] += float64(v)
				}
			}
			residual, err := s.Residual()
			if err != nil {
				return err
			}
			l.add(&l.out, standin.Bits(residual), 1)
			l.mu.Lock()
			for i, v := range sums {
				l.out[i] += v
			}
			l.mu.Unlock()
			return errors.Join(s.Close(), g.Free())
		})
		assert.True(t, seen, "%s: no result was too large", pattern)
		for i, v := range l.out {
			assert.InEpsilon(t, float64(ranks*steps*value), v, 1./2048, "%s, index %d", pattern, i)
		}
	}
}

// TestLargeResidual makes a gradient pass whose remainder in the residual, with its velocity, no later step can send:
// they are skipped until it is scaled down.
func TestLargeResidual(t *testing.T) {
	const n = 20
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		u, err := standin.NewTrainee(rt, c, engine.Config{Pattern: sparsity.TopkA, Density: 0.1, Momentum: 0.9}, n)
		require.NoError(t, err)
		skipped := func(x float32) bool {
			require.NoError(t, u.T.Fill(float64(x)))
			require.NoError(t, u.S.AllReduce(ctx, u.T))
			stats, err := u.S.Stats(ctx)
			require.NoError(t, err)
			return stats.Skipped
		}
		assert.False(t, skipped(0.6*math.MaxFloat32/2))
		for range 3 {
			assert.True(t, skipped(0))
		}
		require.NoError(t, u.S.ScaleResidual(0.1))
		for range 3 {
			assert.False(t, skipped(1))
		}
		return u.Close()
	})
}

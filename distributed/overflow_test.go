package distributed_test

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestOverflow gives one rank a gradient with infinities, everywhere or at one
// place, in a sequence of steps, and compares what follows with a sequence without
// that step: the same bits.
func TestOverflow(t *testing.T) {
	const ranks, n, bad, steps = 3, 1500, 2, 6
	places := map[string]func(g []float32){
		"everywhere": func(g []float32) {
			for i := range g {
				g[i] = float32(math.Inf(1))
			}
		},
		"one NaN": func(g []float32) { g[n/2] = float32(math.NaN()) },
		"sums":    func(g []float32) { g[7] = math.MaxFloat32 },
	}
	for _, pattern := range distributed.Patterns() {
		for name, spoil := range places {
			for _, policy := range []distributed.OverflowPolicy{distributed.OverflowDrop, distributed.OverflowError} {
				rt := cpu.New()
				run := func(with bool) (all [ranks][][]uint32) {
					require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
						cfg := distributed.Config{Pattern: pattern, Density: 0.1, Overflow: policy, ThresholdInterval: 3, RebalanceInterval: 2}
						rank := c.Rank()
						u, err := newTrainee(rt, c, cfg, n)
						if err != nil {
							return err
						}
						for step := range steps {
							g := u.gradient(step)
							if step == bad {
								if !with {
									continue
								}
								// Where the results of the dense pattern overflow is for its
								// backend to say.
								if rank == 1 || pattern == distributed.Dense && name == "sums" {
									spoil(g)
								}
							}
							before := u.state()
							if err := runtime.CopyIn(u.t, g); err != nil {
								return err
							}
							given := bits(u.t)
							err := u.s.AllReduce(ctx, u.t)
							stats, statsErr := u.s.Stats(ctx)
							if step != bad {
								all[rank] = append(all[rank], bits(u.t), u.state())
								assert.False(t, stats.Skipped, "%s, %s, step %d", pattern, name, step)
								if err := errors.Join(err, statsErr); err != nil {
									return err
								}
								continue
							}
							want := make([]uint32, n)
							if policy == distributed.OverflowError {
								assert.ErrorIs(t, err, distributed.ErrOverflow, "%s, %s, rank %d", pattern, name, rank)
								want = given
							} else {
								assert.NoError(t, errors.Join(err, statsErr))
								assert.True(t, stats.Skipped, "%s, %s, rank %d", pattern, name, rank)
								assert.Zero(t, stats.PickedGlobal, "%s, %s, rank %d", pattern, name, rank)
							}
							assert.Equal(t, want, bits(u.t), "%s, %s, rank %d", pattern, name, rank)
							assert.Equal(t, before, u.state(), "%s, %s, rank %d", pattern, name, rank)
						}
						return u.close()
					}))
					return all
				}
				assert.Equal(t, run(false), run(true), "%s, %s", pattern, name)
				require.NoError(t, rt.Close())
			}
		}
	}
}

// TestOverflowWhileNothingIsSent gives one rank a gradient that later steps could not
// send, in an epoch in which gradients only add up: that rank goes without it, and no
// step after the epoch is dropped. The reference is a run in which it is zero.
func TestOverflowWhileNothingIsSent(t *testing.T) {
	const ranks, n, bad, steps = 3, 1500, 1, 5
	limit := float32(math.MaxFloat32) / ranks
	for _, pattern := range distributed.Patterns()[1:] {
		for name, value := range map[string]float32{"the least": limit, "the largest": -math.MaxFloat32, "infinite": float32(math.Inf(1))} {
			for _, policy := range []distributed.OverflowPolicy{distributed.OverflowDrop, distributed.OverflowError} {
				run := func(spoil, streams bool) (all [ranks][][]uint32) {
					world(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
						rank, memory := c.Rank(), runtime.Runtime(rt)
						if streams { // then the device judges
							memory, c = newOnStream(rt), newOrdered(ctx, c)
						}
						u, err := newTrainee(memory, c, distributed.Config{Pattern: pattern, Density: 0.1, Overflow: policy,
							Schedule: distributed.Schedule{Densities: []float64{0}, StepsPerEpoch: bad + 2}}, n)
						if err != nil {
							return err
						}
						for step := range steps {
							g := u.gradient(step)
							if step == bad && rank == 1 {
								clear(g)
								if spoil {
									g[n/2] = value
								}
							}
							if err := errors.Join(runtime.CopyIn(u.t, g), u.s.AllReduce(ctx, u.t)); err != nil {
								return err
							}
							stats, err := u.s.Stats(ctx)
							if err != nil {
								return err
							}
							assert.Equal(t, spoil && step == bad && rank == 1, stats.Skipped, "%s, %s, rank %d, step %d", pattern, name, rank, step)
							all[rank] = append(all[rank], bits(u.t), u.state())
						}
						return u.close()
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

// TestOverflowOnDevice checks that where the host does not wait for the device,
// the device undoes the step, and that the host learns of it when it asks.
func TestOverflowOnDevice(t *testing.T) {
	const n = 64
	for _, pattern := range []string{distributed.Dense, "topkA", "topkA2", "topkAopt", "gtopk", "gaussiank"} {
		withStreams(t, func(ctx context.Context, s *streamed, c comm.Communicator) {
			u, err := newTrainee(s, c, distributed.Config{Pattern: pattern, Density: 0.1, Overflow: distributed.OverflowDrop}, n)
			require.NoError(t, err)
			for step := range 4 {
				g, before := u.gradient(step), u.state()
				if step%2 == 1 {
					g[9] = float32(math.Inf(-1))
				}
				require.NoError(t, runtime.CopyIn(u.t, g))
				s.take()
				require.NoError(t, u.s.AllReduce(ctx, u.t))
				assert.NotContains(t, s.take(), "HOST-WAITS", pattern)
				if pattern != distributed.Dense {
					sums, err := runtime.New(s, dtype.F32, n)
					require.NoError(t, errors.Join(err, sums.Fill(0), u.s.AddResult(sums, 1)))
					if step%2 == 1 {
						assert.Equal(t, make([]uint32, n), bits(sums), "%s: the result of a step that was dropped", pattern)
					}
					require.NoError(t, sums.Free())
				}
				stats, err := u.s.Stats(ctx)
				require.NoError(t, err)
				assert.Equal(t, step%2 == 1, stats.Skipped, "%s, step %d", pattern, step)
				if stats.Skipped {
					assert.Equal(t, make([]uint32, n), bits(u.t), pattern)
					assert.Equal(t, before, u.state(), pattern)
				}
			}
			require.NoError(t, u.close())
		})
	}
}

// TestSaturation reduces gradients of 1000 everywhere as F16: what adds up in the
// residuals while other entries are sent is soon beyond the largest F16. Results
// are the largest number then, and the rest stays in the residuals: nothing gets
// lost but what results are rounded by.
func TestSaturation(t *testing.T) {
	const ranks, n, steps, value, largest = 3, 300, 150, 1000, 65504
	for _, pattern := range distributed.Patterns()[1:] {
		var l ledger
		seen := false
		world(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			s, err := distributed.NewSparse(rt, c, n, distributed.Config{Pattern: pattern, Density: 0.01})
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
			l.add(&l.out, bits(residual), 1)
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

// TestLargeResidual has a gradient pass of which the residual keeps so much that, with
// its velocity, no later step can send it: they are dropped until it is scaled down.
func TestLargeResidual(t *testing.T) {
	const n = 20
	world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		u, err := newTrainee(rt, c, distributed.Config{Pattern: distributed.TopkA, Density: 0.1, Momentum: 0.9}, n)
		require.NoError(t, err)
		skipped := func(x float32) bool {
			require.NoError(t, u.t.Fill(float64(x)))
			require.NoError(t, u.s.AllReduce(ctx, u.t))
			stats, err := u.s.Stats(ctx)
			require.NoError(t, err)
			return stats.Skipped
		}
		assert.False(t, skipped(0.6*math.MaxFloat32/2))
		for range 3 {
			assert.True(t, skipped(0))
		}
		require.NoError(t, u.s.ScaleResidual(0.1))
		for range 3 {
			assert.False(t, skipped(1))
		}
		return u.close()
	})
}

package engine_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestResume interrupts a run after each of its steps and goes on with other
// Reducers: the same bits as without the interruption, warm-up and epochs too.
func TestResume(t *testing.T) {
	const ranks, steps = 3, 9
	type reduction struct {
		n      int
		cfg    engine.Config
		tuning tuning.Tuning
	}
	// Large enough for the partitions' shares of the result to be bounded one by one.
	cases := []reduction{{40_000, engine.Config{Pattern: sparsity.Oktopk, Density: 0.05}, tuning.Tuning{ThresholdInterval: 7}}}
	for _, pattern := range sparsity.Patterns() {
		cfg := engine.Config{
			Pattern:  pattern,
			Density:  0.1,
			Schedule: engine.Schedule{WarmupSteps: 1, Densities: []float64{0.3, 0}, StepsPerEpoch: 1},
		}
		cases = append(cases, reduction{3000, cfg, tuning.Tuning{ThresholdInterval: 3, RebalanceInterval: 4}})
	}
	for _, x := range cases {
		n, cfg := x.n, x.cfg
		tuning.Set(t, x.tuning)
		rt := cpu.New()
		run := func(cut int) (all [ranks][]uint64) {
			require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				u, err := standin.NewTrainee(rt, c, cfg, n)
				for step := range steps {
					if step == cut && err == nil {
						var state []byte
						if state, err = u.S.State(ctx); err == nil {
							err = u.Close()
						}
						if err == nil {
							u, err = standin.NewTrainee(rt, c, cfg, n)
						}
						if err == nil {
							err = u.S.Restore(ctx, state)
						}
					}
					if err != nil {
						return err
					}
					if err = u.Step(ctx, step); err != nil {
						return err
					}
					all[c.Rank()] = append(all[c.Rank()], standin.Digest(standin.Bits(u.T), u.State()))
				}
				stats, err := u.S.Stats(ctx)
				assert.Equal(t, steps-1, stats.Step)
				return errors.Join(err, u.Close())
			}))
			return all
		}
		want := run(-1)
		for cut := range steps {
			assert.Equal(t, want, run(cut), "%s of %d, cut before step %d", cfg.Pattern, n, cut)
		}
		require.NoError(t, rt.Close())
	}
}

// TestRestoreWrong restores what is not the state of this Reducer: an error, and
// nothing has changed.
func TestRestoreWrong(t *testing.T) {
	const n = 500
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		cfg := engine.Config{Pattern: "oktopk", Density: 0.1}
		u, err := standin.NewTrainee(rt, c, cfg, n)
		if err != nil {
			return err
		}
		if err := u.Step(ctx, 0); err != nil {
			return err
		}
		mine, err := u.S.State(ctx)
		if err != nil {
			return err
		}
		alone, err := local.New(1)
		if err != nil {
			return err
		}
		defer alone[0].Close()
		mismatches := [][]byte{}
		for _, other := range []struct {
			c   comm.Communicator
			cfg engine.Config
			n   int
		}{
			{c, engine.Config{Pattern: "oktopk", Density: 0.2}, n}, {c, engine.Config{Pattern: "topkA", Density: 0.1}, n},
			{c, engine.Config{}, n}, {c, cfg, n + 1}, {alone[0], engine.Config{Pattern: "gtopk", Density: 0.1}, n},
		} {
			s, err := engine.New(rt, other.c, other.n, other.cfg)
			if err != nil {
				return err
			}
			state, err := s.State(ctx)
			if err = errors.Join(err, s.Close()); err != nil {
				return err
			}
			mismatches = append(mismatches, state)
		}
		for i, state := range mismatches {
			assert.ErrorIs(t, u.S.Restore(ctx, state), comm.ErrMismatch, "%d", i)
		}
		assert.ErrorIs(t, u.S.Restore(ctx, mine, mine), comm.ErrMismatch, "two states")
		assert.ErrorIs(t, u.S.Restore(ctx), comm.ErrArgument, "no state")
		for i := range len(mine) {
			damaged := bytes.Clone(mine)
			damaged[i] ^= 1 << (i % 8)
			assert.ErrorIs(t, u.S.Restore(ctx, damaged), comm.ErrArgument, "byte %d", i)
			assert.ErrorIs(t, u.S.Restore(ctx, mine[:i]), comm.ErrArgument, "%d bytes", i)
		}
		assert.ErrorIs(t, u.S.Restore(ctx, append(bytes.Clone(mine), 0)), comm.ErrArgument)
		over, cancel := context.WithCancel(ctx)
		cancel()
		_, _ = u.S.State(over) // an error of this wait, if it waits, does not stay
		after, err := u.S.State(ctx)
		assert.Equal(t, mine, after)
		return errors.Join(err, u.Close())
	})
}

// TestWhatRan checks that statistics name the pattern that served a step.
func TestWhatRan(t *testing.T) {
	rt := cpu.New()
	for _, k := range []struct {
		ranks   int
		pattern string
		density float64
		want    string
	}{
		{2, "topkA", 0.1, "topkA"}, {2, "dense", 0, "dense"},
		{2, "oktopk", 0.1, "oktopk"}, {2, "oktopk", 0.5, "dense"}, {3, "oktopk", 0.001, "topkA2"}, {4, "oktopk", 0.001, "gtopk"},
	} {
		require.NoError(t, local.Run(t.Context(), k.ranks, func(ctx context.Context, c comm.Communicator) error {
			u, err := standin.NewTrainee(rt, c, engine.Config{Pattern: k.pattern, Density: k.density, Schedule: engine.Schedule{WarmupSteps: 1}}, 3000)
			for step, want := range []string{"dense", k.want} {
				if err == nil {
					err = u.Step(ctx, step)
				}
				if err != nil {
					return err
				}
				stats, statsErr := u.S.Stats(ctx)
				assert.Equal(t, want, stats.Pattern, "%s, density %v", k.pattern, k.density)
				err = statsErr
			}
			if _, none := u.S.Residual(); k.pattern == "dense" {
				assert.ErrorIs(t, none, comm.ErrUnsupported)
			}
			return errors.Join(err, u.Close())
		}))
	}
	require.NoError(t, rt.Close())
}

// TestWhatWasSelected: of steps whose result is dense the statistics say what was selected,
// and the selected entries can be read.
func TestWhatWasSelected(t *testing.T) {
	const n = 3000
	for _, k := range []struct {
		pattern string
		density float64
		warmup  int
		none    int // this rank has a gradient of zeros
		local   [2]int
		list    int // how long rank 0's list of selected entries is
	}{
		{"oktopk", 0.5, 0, -1, [2]int{n, n}, 0}, // sends everything
		{"topkSA", 0.8, 0, 1, [2]int{2400, 0}, 2400},
		{"topkA", 0.8, 1, -1, [2]int{n, n}, 0},
	} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			s, err := engine.New(rt, c, n, engine.Config{Pattern: k.pattern, Density: k.density, Schedule: engine.Schedule{WarmupSteps: k.warmup}})
			require.NoError(t, err)
			g, err := runtime.FromSlice(rt, standin.Normal(n, c.Rank()))
			require.NoError(t, err)
			if c.Rank() == k.none {
				require.NoError(t, g.Fill(0))
			}
			require.NoError(t, s.AllReduce(ctx, g))
			stats, err := s.Stats(ctx)
			require.NoError(t, err)
			assert.Equal(t, k.local[c.Rank()], stats.SelectedLocal, "%s, rank %d", k.pattern, c.Rank())
			assert.Equal(t, n, stats.SelectedGlobal, k.pattern)
			if k.list == 0 {
				assert.Zero(t, stats.Threshold, "%s: nothing was selected by one", k.pattern)
			}
			_, err = s.Entries()
			assert.ErrorIs(t, err, comm.ErrUnsupported, k.pattern)
			selected, err := s.SelectedEntries()
			require.NoError(t, err, k.pattern)
			indices, _, err := s.Read(ctx, selected)
			require.NoError(t, err, k.pattern)
			if c.Rank() == 0 {
				assert.Len(t, indices, k.list, k.pattern)
			}
			return errors.Join(s.Close(), g.Free())
		})
	}
}

// TestRestoreOtherWorld saves a run of some ranks and goes on with fewer and with
// more: the number of the step and the sum of the residuals stay, up to rounding,
// and a rank that is given another one's state says so.
func TestRestoreOtherWorld(t *testing.T) {
	const n, steps = 2000, 3
	for _, pattern := range []string{sparsity.Dense, "topkA", "topkAopt", "gtopk", "topkSA", "oktopk"} {
		for _, saved := range []int{2, 5} {
			rt := cpu.New()
			cfg := engine.Config{Pattern: pattern, Density: 0.1}
			states := make([][]byte, saved)
			var before ledger
			require.NoError(t, local.Run(t.Context(), saved, func(ctx context.Context, c comm.Communicator) error {
				u, err := standin.NewTrainee(rt, c, cfg, n)
				for step := range steps {
					if err == nil {
						err = u.Step(ctx, step)
					}
				}
				if err != nil {
					return err
				}
				before.add(&before.in, u.State(), 1)
				states[c.Rank()], err = u.S.State(ctx)
				return errors.Join(err, u.Close())
			}))
			for _, size := range []int{1, 2, 3, 7} {
				var after ledger
				require.NoError(t, local.Run(t.Context(), size, func(ctx context.Context, c comm.Communicator) error {
					u, err := standin.NewTrainee(rt, c, cfg, n)
					if err != nil {
						return err
					}
					var mine [][]byte
					for _, r := range engine.RestoreRanks(saved, size, c.Rank()) {
						mine = append(mine, states[r])
					}
					assert.ErrorIs(t, u.S.Restore(ctx, append(mine, states[0])...), comm.ErrMismatch, "one too many")
					if len(mine) > 1 {
						assert.ErrorIs(t, u.S.Restore(ctx, mine[0]), comm.ErrMismatch, "one too few")
					}
					if err := u.S.Restore(ctx, mine...); err != nil {
						return err
					}
					after.add(&after.in, u.State(), 1)
					if err := u.Step(ctx, steps); err != nil {
						return err
					}
					stats, err := u.S.Stats(ctx)
					assert.Equal(t, steps, stats.Step, "%s, %d to %d ranks", pattern, saved, size)
					return errors.Join(err, u.Close())
				}))
				for i, want := range before.in {
					assert.InDelta(t, want, after.in[i], 1e-5*(1+math.Abs(want)), "%s, %d to %d ranks, index %d", pattern, saved, size, i)
				}
			}
			require.NoError(t, rt.Close())
		}
	}
}

// TestScaleResidual: with residual and gradients four times as large, results are, except with patterns that look for
// another threshold then.
func TestScaleResidual(t *testing.T) {
	const ranks, n, steps, at = 2, 2000, 8, 3
	for _, pattern := range sparsity.Patterns() {
		if pattern == sparsity.TopkAopt || pattern == sparsity.Oktopk {
			continue
		}
		rt := cpu.New()
		run := func(factor float32) (all [ranks][][]float32) {
			require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				u, err := standin.NewTrainee(rt, c, engine.Config{Pattern: pattern, Density: 0.1}, n)
				if err != nil {
					return err
				}
				for _, wrong := range []float64{-1, math.NaN(), math.Inf(1), 1e300} {
					assert.ErrorIs(t, u.S.ScaleResidual(wrong), comm.ErrArgument, "%v", wrong)
				}
				for step := range steps {
					g := u.Gradient(step)
					if step >= at {
						for i := range g {
							g[i] *= factor
						}
					}
					if step == at {
						err = u.S.ScaleResidual(float64(factor))
					}
					if err = errors.Join(err, runtime.CopyIn(u.T, g), u.S.AllReduce(ctx, u.T)); err != nil {
						return err
					}
					result, err := runtime.ToSlice[float32](u.T)
					if err != nil {
						return err
					}
					all[c.Rank()] = append(all[c.Rank()], result)
				}
				return u.Close()
			}))
			return all
		}
		want := run(1)
		for _, steps := range want {
			for _, result := range steps[at:] {
				for i := range result {
					result[i] *= 4
				}
			}
		}
		assert.Equal(t, want, run(4), pattern)
		require.NoError(t, rt.Close())
	}
}

// TestDecayedResidual: where the residual decays in each step, and gradients do not, a threshold is reused as without.
func TestDecayedResidual(t *testing.T) {
	const n, steps = 20_000, 70
	for _, pattern := range []string{sparsity.TopkAopt, sparsity.Oktopk} {
		for _, factor := range []float64{1, 0.95} {
			rt := cpu.New()
			require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
				u, err := standin.NewTrainee(rt, c, engine.Config{Pattern: pattern, Density: 0.05}, n)
				if err != nil {
					return err
				}
				exact := 0
				for step := range steps {
					gradient := standin.Normal(n, 2*step+c.Rank())
					if err := errors.Join(runtime.CopyIn(u.T, gradient), u.S.AllReduce(ctx, u.T)); err != nil {
						return err
					}
					stats, err := u.S.Stats(ctx)
					if err := errors.Join(err, u.S.ScaleResidual(factor)); err != nil {
						return err
					}
					if step >= steps/3 && stats.SelectedLocal == stats.K {
						exact++
					}
				}
				assert.LessOrEqual(t, exact, 4, "%s, factor %v", pattern, factor)
				return u.Close()
			}))
			require.NoError(t, rt.Close())
		}
	}
}

// TestScaledThreshold: with other units all entries are still sent once, by patterns that reuse thresholds.
func TestScaledThreshold(t *testing.T) {
	const n, steps, half = 2000, 40, 20
	for _, pattern := range []string{sparsity.TopkAopt, sparsity.Oktopk} {
		for _, factor := range []float64{1. / 64, 64} {
			rt := cpu.New()
			require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
				u, err := standin.NewTrainee(rt, c, engine.Config{Pattern: pattern, Density: 0.1}, n)
				if err != nil {
					return err
				}
				want := make([]float64, n)
				got := make([]float64, n)
				for step := range steps {
					scale := 1.
					if step == half {
						scale = factor
						if err := u.S.ScaleResidual(factor); err != nil {
							return err
						}
					}
					gradient := standin.Normal(n, step)
					for i := range gradient {
						if step >= half {
							gradient[i] *= float32(factor)
						}
						want[i] = want[i]*scale + float64(gradient[i])
						got[i] *= scale
					}
					if err := errors.Join(runtime.CopyIn(u.T, gradient), u.S.AllReduce(ctx, u.T)); err != nil {
						return err
					}
					result, err := runtime.ToSlice[float32](u.T)
					stats, failed := u.S.Stats(ctx)
					if err := errors.Join(err, failed); err != nil {
						return err
					}
					assert.InDelta(t, stats.K, stats.SelectedLocal, 0.8*float64(stats.K), "%s, step %d", pattern, step)
					for i, x := range result {
						got[i] += float64(x)
					}
				}
				left, err := u.S.Residual()
				if err != nil {
					return err
				}
				residual, err := runtime.ToSlice[float32](left)
				for i, x := range residual {
					assert.InDelta(t, want[i], got[i]+float64(x), 1e-3*max(1, factor), "%s, entry %d", pattern, i)
				}
				return errors.Join(err, u.Close())
			}))
			require.NoError(t, rt.Close())
		}
	}
}

// TestRebindAfterDrop: what the device decided about the last step is known with
// another communicator, too.
func TestRebindAfterDrop(t *testing.T) {
	for _, bad := range []bool{false, true} {
		standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
			u, err := standin.NewTrainee(s, c, engine.Config{Pattern: "topkA", Density: 0.1}, 64)
			require.NoError(t, err)
			g := u.Gradient(0)
			if bad {
				g[5] = float32(math.NaN())
			}
			require.NoError(t, errors.Join(runtime.CopyIn(u.T, g), u.S.AllReduce(ctx, u.T), u.S.Rebind(c)))
			stats, err := u.S.Stats(ctx)
			require.NoError(t, err)
			assert.Equal(t, bad, stats.Skipped)
			require.NoError(t, u.Close())
		})
	}
}

// forgeries are the configurations whose states FuzzRestore forges.
var forgeries = []struct {
	cfg      engine.Config
	ranks, n int
}{
	{engine.Config{}, 1, 64},
	{engine.Config{Pattern: "topkA", Density: 0.1}, 1, 64},
	{engine.Config{Pattern: "oktopk", Density: 0.1}, 1, 64}, // which is topkA2
	{engine.Config{Pattern: "topkSA", Density: 0.1}, 2, 64},
	{engine.Config{Pattern: "gaussiankSA", Density: 0.1}, 3, 64},
	{engine.Config{Pattern: "oktopk", Density: 0.25}, 2, 256},
}

// FuzzRestore forges states, with a checksum that is right: all ranks go on as if
// nothing had happened, or as if the forgery were the truth, which loses nothing.
func FuzzRestore(f *testing.F) {
	for which, k := range forgeries {
		for word := range 100 { // those before the residual, behind the magic
			for _, value := range []uint32{20, 40}[:min(k.ranks, 1+word/50)] {
				f.Add(uint8(which), uint16(13+4*word), binary.LittleEndian.AppendUint32(nil, value))
			}
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, at uint16, change []byte) {
		k := forgeries[int(which)%len(forgeries)]
		var l ledger
		var refused, failed atomic.Int32 // ranks; those whose step is rolled back fail, too
		standin.World(t, k.ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			u, err := standin.NewTrainee(rt, c, k.cfg, k.n)
			require.NoError(t, err)
			require.NoError(t, u.Step(ctx, 0))
			state, err := u.S.State(ctx)
			require.NoError(t, err)
			body := bytes.Clone(state[:len(state)-4])
			copy(body[int(at)%len(body):], change)
			err = u.S.Restore(ctx, binary.LittleEndian.AppendUint32(body, crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli))))
			if err != nil {
				require.True(t, errors.Is(err, comm.ErrArgument) || errors.Is(err, comm.ErrMismatch), "%v", err)
				refused.Add(1)
			}
			require.NoError(t, c.Barrier(ctx))
			if refused.Load() > 0 { // the others have what was forged
				if err == nil {
					err = u.S.Restore(ctx, state)
				} else {
					err = nil
				}
				return errors.Join(err, u.Step(ctx, 1), u.Close())
			}
			require.NoError(t, u.Load(1))
			l.add(&l.in, standin.Bits(u.T), 1)
			if before := u.State(); before != nil {
				l.add(&l.in, before, 1)
			}
			failure := u.S.AllReduce(ctx, u.T)
			if failure != nil {
				_ = c.Close() // the others wait
			}
			if stats, _ := u.S.Stats(ctx); failure != nil || stats.Skipped {
				failed.Add(1)
			}
			l.add(&l.out, standin.Bits(u.T), 1)
			if after := u.State(); after != nil {
				l.add(&l.out, after, 1)
			}
			return u.Close()
		})
		if failed.Load() > 0 {
			return
		}
		for i := range l.in {
			if most := math.Abs(l.in[i]) + math.Abs(l.out[i]); most < 1e6 { // not a forged infinity
				assert.InDelta(t, l.in[i], l.out[i], 1e-5*(1+most), "index %d", i)
			}
		}
	})
}

package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// An asynchronous copy that could not be closed, as its copy does not end, is closed with the Reducer, when
// that is closed again.
func TestCloseOfHostCopyFails(t *testing.T) {
	standin.FreshWorld(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		fails := &standin.Stumbling{Kernels: rt.Kernels(), Call: "close"}
		memory := standin.NewCopying(rt, new(standin.Waits), fails, nil)
		u, err := standin.NewTrainee(memory, standin.NewOrdered(ctx, c), engine.Config{Pattern: sparsity.Oktopk, Density: 0.1}, 3000)
		if err := errors.Join(err, u.Step(ctx, 0)); err != nil {
			return err
		}
		live := rt.Stats().LiveBytes
		fails.In = 1
		assert.ErrorIs(t, u.S.Close(), standin.ErrKernel)
		assert.Equal(t, live, rt.Stats().LiveBytes, "the copy may still read it")
		fails.In = 2
		assert.NoError(t, u.Close())
		assert.Equal(t, 1, fails.In, "the copy is closed again")
		return nil
	})
}

// A failure after the result has replaced the gradient cannot be rolled back, and its error does not say that it was:
// it stays.
func TestFailureBehindTheResult(t *testing.T) {
	const n, steps = 24_000, 40
	for _, call := range []string{"post", "copy if"} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			fails := &standin.Stumbling{Kernels: rt.Kernels(), Call: call, In: 3}
			memory := standin.NewCopying(rt, new(standin.Waits), fails, nil)
			u, err := standin.NewTrainee(memory, standin.NewOrdered(ctx, c), engine.Config{Pattern: sparsity.Oktopk, Density: 0.1}, n)
			for step := 0; err == nil && step < steps; step++ {
				err = u.Step(ctx, step)
			}
			assert.ErrorIs(t, err, standin.ErrKernel, call)
			assert.ErrorContains(t, err, "the gradient is lost", call)
			assert.NotContains(t, err.Error(), "rolled back", call)
			assert.EqualError(t, u.Step(ctx, 0), err.Error(), call)
			return u.Close()
		})
	}
}

// The host reads numbers in the step after: with and without it, steps have the bits of a host that waits for
// everything, whatever comes between them. Nothing gets lost.
func TestOktopkReadsLater(t *testing.T) {
	n, steps := 10_000, 54 // two rebalances
	if standin.Extended {
		n, steps = 16_000, 80
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	worlds := []int{2, 3, 4}
	if testing.Short() {
		worlds = []int{2}
	}
	for _, ranks := range worlds {
		for name, cfg := range map[string]engine.Config{
			"drop":    {},
			"pass":    {NonFinite: engine.PassNonFinite},
			"error":   {NonFinite: engine.FailNonFinite},
			"no undo": {NoUndo: true},
		} {
			if testing.Short() && name != "drop" && name != "error" {
				continue
			}
			if common := name == "drop" || name == "no undo"; !standin.Extended && (ranks == 3 && !common || ranks == 4 && common) {
				continue // what is left has all policies, and all numbers of ranks
			}
			t.Run(fmt.Sprintf("%d ranks, %s", ranks, name), func(t *testing.T) {
				cfg.Pattern, cfg.Density = sparsity.Oktopk, 0.05
				tuning.Set(t, tuning.Tuning{ThresholdInterval: 10, RebalanceInterval: 25})
				s := script(rand.New(rand.NewPCG(seed, uint64(ranks))), n, ranks, steps, cfg)
				want, _ := s.run(t, false, seed)
				got, unwaited := s.run(t, true, seed)
				for r := range want {
					require.Len(t, got[r], len(want[r]))
					for step := range want[r] {
						require.Equal(t, want[r][step], got[r][step], "seed %d, rank %d, step %d (%+v) has other bits", seed, r, step, s.steps[step])
					}
				}
				t.Logf("%d of %d steps without a wait", unwaited, steps)
			})
		}
	}
}

// act is what a step is like, and what comes before it.
type act struct {
	scale    float32
	cluster  bool // gradients of a part of the tensor are larger
	overflow int  // a rank that has one; -1: none
	value    float32
	fails    int // the failing call, on all ranks, if there are this many; 0: none
	call     string
	restores bool // goes on from what was saved
	asks     bool // for the statistics
	rescales float64
}

type acts struct {
	cfg      engine.Config
	n, ranks int
	steps    []act
}

// script draws what happens.
func script(rng *rand.Rand, n, ranks, steps int, cfg engine.Config) *acts {
	s := &acts{cfg: cfg, n: n, ranks: ranks}
	scale := float32(1)
	for step := range steps {
		a := act{scale: scale, overflow: -1}
		switch rng.IntN(30) {
		case 0:
			scale *= 1000
		case 1:
			scale /= 1000
		case 2, 17, 18, 19:
			a.cluster = true
		case 9, 10, 11, 12: // thresholds follow
			scale *= 1.3
		case 13, 14, 15, 16:
			scale /= 1.3
		case 3:
			a.restores = true
		case 4:
			a.asks = true
		case 5:
			a.rescales = []float64{0.3, 1.7}[rng.IntN(2)]
		case 6:
			if cfg.NonFinite != engine.PassNonFinite && !cfg.NoUndo {
				a.cluster = rng.IntN(2) == 0 // then messages may be cut
				a.overflow, a.value = rng.IntN(ranks), []float32{float32(math.NaN()), float32(math.Inf(-1)), math.MaxFloat32}[rng.IntN(3)]
			}
		case 7, 8:
			if !cfg.NoUndo && step > 0 {
				a.fails = 1 + rng.IntN(2)
			}
		}
		a.scale = scale
		s.steps = append(s.steps, a)
	}
	return s
}

// gradient is a rank's in a step.
func (s *acts) gradient(rank, step int) []float32 {
	a := s.steps[step]
	g := standin.Normal(s.n, rank, step)
	for i := range g {
		g[i] *= a.scale
		if a.cluster && i*8/s.n == step%8 {
			g[i] *= 100
		}
	}
	if a.overflow == rank {
		g[(step*7919)%s.n] = a.value
	}
	return g
}

// run does it. It returns digests of result and residual of each rank after each step,
// and how many steps did without a wait.
func (s *acts) run(t *testing.T, streams bool, seed uint64) (all [][]uint64, unwaited int) {
	rt := cpu.New()
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	all = make([][]uint64, s.ranks)
	var mu sync.Mutex
	balance := make([]conserved, len(s.steps))
	require.NoError(t, local.Run(t.Context(), s.ranks, func(ctx context.Context, c comm.Communicator) error {
		w, rank := new(standin.Waits), c.Rank()
		var memory runtime.Runtime = rt
		fails := &standin.Stumbling{Kernels: rt.Kernels()}
		if streams {
			r := standin.NewCopying(rt, w, fails, nil)
			if rank%2 == 0 {
				r.Rng = rand.New(rand.NewPCG(seed, 7))
			}
			memory, c = r, watched{standin.NewOrdered(ctx, c), w}
		}
		x, err := engine.New(memory, c, s.n, s.cfg)
		if err != nil {
			return err
		}
		tensor, err := runtime.New(memory, dtype.F32, s.n)
		if err != nil {
			return err
		}
		residual := func() []uint32 {
			r, err := x.Residual()
			require.NoError(t, err)
			return standin.Bits(r)
		}
		var after []uint32
		for step, a := range s.steps {
			switch {
			case a.restores:
				state, err := x.State(ctx)
				if err := errors.Join(err, x.Close()); err != nil {
					return err
				}
				if x, err = engine.New(memory, c, s.n, s.cfg); err != nil {
					return err
				}
				if err := x.Restore(ctx, state); err != nil {
					return err
				}
			case a.asks:
				if _, err := x.Stats(ctx); err != nil {
					return err
				}
			case a.rescales > 0:
				if err := x.ScaleResidual(a.rescales); err != nil {
					return err
				}
			}
			g := s.gradient(rank, step)
			if a.restores || a.rescales > 0 {
				after = residual()
			}
			before := after // the step
			made := false
			var err error
			if streams && a.fails > 0 {
				fails.Call, fails.In = a.call, a.fails
				err = errors.Join(runtime.CopyIn(tensor, g), x.AllReduce(ctx, tensor))
				if made = fails.In > 0; made && a.call == "" { // there were fewer calls
					return fmt.Errorf("step %d did not fail: %w", step, err)
				}
				fails.In = 0
				if !made {
					if !errors.Is(err, standin.ErrKernel) {
						return fmt.Errorf("step %d: %w", step, err)
					}
					if !slices.Equal(before, residual()) {
						return fmt.Errorf("step %d is not rolled back", step)
					}
					if err := c.Sync(ctx); err != nil {
						return err
					}
				}
			}
			if !made {
				if err := runtime.CopyIn(tensor, g); err != nil {
					return err
				}
				w.Comm.Store(0)
				w.Copies.Store(0)
				err = x.AllReduce(ctx, tensor)
			}
			if err != nil && !errors.Is(err, engine.ErrNonFinite) {
				return fmt.Errorf("step %d: %w", step, err)
			}
			overflowed := a.overflow >= 0
			if overflowed != (err != nil) && s.cfg.NonFinite == engine.FailNonFinite {
				return fmt.Errorf("step %d: overflow %v, error %v", step, overflowed, err)
			}
			waits := w.Copies.Load() + w.Comm.Load()
			after = residual()
			mu.Lock()
			if waits == 0 && rank == 1 {
				unwaited++
			}
			if !overflowed {
				balance[step].add(g, before, standin.Bits(tensor), after)
			}
			mu.Unlock()
			all[rank] = append(all[rank], standin.Digest(standin.Bits(tensor), after))
		}
		return errors.Join(x.Close(), tensor.Free())
	}))
	for step := range balance {
		balance[step].check(t, seed, step)
	}
	return all, unwaited
}

// A step that fails where it reads numbers of the step before, or where it tells the device
// some, is repeated with the bits that it would have had: also what it had learned, and
// whether the step before was skipped.
func TestOktopkRepeatsWhatFailed(t *testing.T) {
	const n, steps = 24_000, 48
	worlds := []int{2, 3}
	if testing.Short() {
		worlds = worlds[:1]
	}
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 30, RebalanceInterval: 40})
	for _, ranks := range worlds {
		s := &acts{n: n, ranks: ranks, cfg: engine.Config{Pattern: sparsity.Oktopk, Density: 0.1}}
		for step := range steps {
			a := act{scale: []float32{1, 1.2}[step/6%2], overflow: -1} // thresholds follow
			if step%7 == 6 {
				a.overflow, a.value = 0, float32(math.NaN())
			}
			s.steps = append(s.steps, a)
		}
		want, _ := s.run(t, false, 0)
		for i, call := range []string{"read", "fill", "pieces", "copy"} {
			for fails := 1; fails <= 3; fails++ {
				// Unless extended, a call fails in one of the worlds.
				if !standin.Extended && ((i+ranks)%2 > 0 || fails != 1+(i+ranks)%3) {
					continue
				}
				for step := 7; step < steps; step++ {
					s.steps[step].call, s.steps[step].fails = call, fails
				}
				got, _ := s.run(t, true, 0)
				for r := range want {
					for step := range want[r] {
						assert.Equal(t, want[r][step], got[r][step], "%d ranks, %s %d fails: rank %d, step %d has other bits", ranks, call, fails, r, step)
					}
				}
			}
		}
	}
}

// conserved adds up what ranks had before a step, and have after it.
type conserved struct{ in, out, size []float64 }

func (c *conserved) add(g []float32, before, result, after []uint32) {
	if c.in == nil {
		c.in, c.out, c.size = make([]float64, len(g)), make([]float64, len(g)), make([]float64, len(g))
	}
	for i := range g {
		x := float64(g[i])
		if before != nil {
			x += float64(math.Float32frombits(before[i]))
		}
		c.in[i] += x
		c.out[i] += float64(math.Float32frombits(result[i])) + float64(math.Float32frombits(after[i])) // the result has 1/P from each
		c.size[i] += math.Abs(x)
	}
}

func (c *conserved) check(t *testing.T, seed uint64, step int) {
	for i := range c.in {
		if math.Abs(c.in[i]-c.out[i]) > 1e-5*c.size[i] {
			require.InDelta(t, c.in[i], c.out[i], 1e-5*c.size[i], "seed %d, step %d, index %d", seed, step, i)
		}
	}
}

// Steps do not wait once thresholds serve, also those that find thresholds or partitions anew.
func TestOktopkDoesNotWait(t *testing.T) {
	const n, ranks, steps, early = 30_000, 2, 64, 24
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 8, RebalanceInterval: 16})
	for _, overflow := range []engine.NonFinitePolicy{engine.SkipNonFinite, engine.PassNonFinite} {
		cfg := engine.Config{Pattern: sparsity.Oktopk, Density: 0.05, NonFinite: overflow}
		s := &acts{cfg: cfg, n: n, ranks: ranks}
		for range steps {
			s.steps = append(s.steps, act{scale: 1, overflow: -1})
		}
		_, unwaited := s.run(t, true, 0)
		assert.GreaterOrEqual(t, unwaited, steps-early, "of %d steps", steps)
	}
}

// A step that balances partitions, and is skipped: what ranks announced in it may be more than the
// partitions have that there are again.
func TestOktopkDropsWhatBalances(t *testing.T) {
	const n, ranks, balances, steps = 60_000, 2, 16, 20
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 1000, RebalanceInterval: balances})
	run := func(streams bool) [][]uint32 {
		results := make([][]uint32, ranks)
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			var memory runtime.Runtime = rt
			w := new(standin.Waits)
			if streams {
				memory, c = standin.NewCopying(rt, w, &standin.Stumbling{Kernels: rt.Kernels()}, nil), watched{standin.NewOrdered(ctx, c), w}
			}
			u, err := standin.NewTrainee(memory, c, engine.Config{Pattern: sparsity.Oktopk, Density: 0.05}, n)
			for step := 0; err == nil && step < steps; step++ {
				g := u.Gradient(step)
				for i := range g { // large ones are near the beginning, but in that step
					switch {
					case step == balances && i >= n/2:
						g[i] *= 1000
					case step != balances && i >= n/15:
						g[i] /= 1000
					}
				}
				if step == balances {
					g[n-1] = float32(math.NaN())
				}
				err = runtime.CopyIn(u.T, g)
				w.Comm.Store(0)
				if err = errors.Join(err, u.S.AllReduce(ctx, u.T)); err != nil {
					return fmt.Errorf("step %d: %w", step, err)
				}
				if step == balances {
					assert.Zero(t, w.Comm.Load(), "the host does not wait")
				}
				results[c.Rank()] = append(append(results[c.Rank()], standin.Bits(u.T)...), u.State()...)
			}
			return errors.Join(err, u.Close())
		})
		return results
	}
	want, got := run(false), run(true)
	for r := range want {
		assert.True(t, slices.Equal(want[r], got[r]), "rank %d has other bits", r)
	}
}

package engine_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// autoStep is what a step of Auto did on a rank.
type autoStep struct {
	result []float32
	stats  engine.Stats
	choice *engine.Choice
}

// runAuto makes steps of Auto on communicators that wrap makes, and returns what
// they did, by step and rank.
func runAuto(t *testing.T, ranks, n, steps int, cfg engine.Config, wrap func(c comm.Communicator) comm.Communicator) [][]autoStep {
	t.Helper()
	cfg.Pattern = sparsity.Auto
	all := make([][]autoStep, steps)
	for i := range all {
		all[i] = make([]autoStep, ranks)
	}
	b := standin.Backend(t, ranks)
	require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		s, err := engine.New(r.Runtime, wrap(r.Comm), n, cfg)
		if err != nil {
			return err
		}
		tensor, err := runtime.New(r.Runtime, dtype.F32, n)
		if err != nil {
			return err
		}
		_, err = s.Residual()
		assert.ErrorIs(t, err, comm.ErrUnsupported, "nothing is chosen yet")
		for step := range steps {
			if err := runtime.CopyIn(tensor, standin.Normal(n, r.Comm.Rank(), step)); err != nil {
				return err
			}
			if err := s.AllReduce(ctx, tensor); err != nil {
				return err
			}
			result, err := runtime.ToSlice[float32](tensor)
			if err != nil {
				return err
			}
			stats, err := s.Stats(ctx)
			if err != nil {
				return err
			}
			all[step][r.Comm.Rank()] = autoStep{result, stats, s.Choice()}
		}
		return errors.Join(s.Close(), tensor.Free())
	}))
	return all
}

func plainComm(c comm.Communicator) comm.Communicator { return c }

// All ranks choose the same, whatever each measures, from a bounded number of trials, and use it in every step. Trials
// have the whole tensor, or less if steps of topkA take long.
func TestAutoAgrees(t *testing.T) {
	const n = 20_000
	cfg := engine.Config{Density: 0.02}
	paced := func(each time.Duration) func(comm.Communicator) comm.Communicator {
		return func(c comm.Communicator) comm.Communicator {
			return standin.Pace(c, func(comm.Call) time.Duration { return time.Duration(c.Rank()) * each })
		}
	}
	for _, link := range []struct {
		wrap        func(comm.Communicator) comm.Communicator
		least, most int // elements of a trial
	}{{plainComm, 1, n}, {paced(10 * time.Microsecond), n, n}, {paced(10 * time.Millisecond), 1, n - 1}} {
		for _, ranks := range []int{2, 3, 5} {
			steps := runAuto(t, ranks, n, 3, cfg, link.wrap)
			choice := steps[0][0].choice
			require.NotNil(t, choice)
			assert.Contains(t, sparsity.Patterns(), choice.Pattern)
			assert.GreaterOrEqual(t, choice.Elements, link.least)
			assert.LessOrEqual(t, choice.Elements, link.most)
			assert.Equal(t, (choice.Elements+25)/50, choice.K)
			assert.LessOrEqual(t, len(choice.Trials), len(sparsity.Patterns()))
			for _, step := range steps {
				for rank, s := range step {
					require.Equal(t, choice.Pattern, s.choice.Pattern, "rank %d of %d", rank, ranks)
					require.Equal(t, choice.Trials, s.choice.Trials, "they agreed on the times")
					require.Equal(t, hostmem.Bytes(step[0].result), hostmem.Bytes(s.result))
					if choice.Pattern != sparsity.Oktopk { // which may use another
						require.Equal(t, choice.Pattern, s.stats.Pattern)
					}
				}
			}
		}
	}
}

// Where a dense step's call takes 10 ms longer than any other, a sparse pattern is
// chosen, and where all calls but that take 2 ms longer, the dense one.
func TestAutoChooses(t *testing.T) {
	const ranks, n = 2, 100_000
	cfg := engine.Config{Density: 0.01}
	slow := func(c comm.Communicator) comm.Communicator {
		return standin.Pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce {
				return time.Duration(call.Count) * 100 * time.Nanosecond
			}
			return 0
		})
	}
	for _, s := range runAuto(t, ranks, n, 1, cfg, slow)[0] {
		require.NotEqual(t, sparsity.Dense, s.choice.Pattern, "%v", s.choice.Trials)
		require.False(t, s.stats.Dense)
		require.Less(t, s.stats.SentElements, int64(n/10), "what was sent to choose does not count")
	}
	costly := func(c comm.Communicator) comm.Communicator {
		return standin.Pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce {
				return 0
			}
			return 2 * time.Millisecond
		})
	}
	for _, s := range runAuto(t, ranks, n, 2, cfg, costly)[1] {
		require.Equal(t, sparsity.Dense, s.choice.Pattern, "%v", s.choice.Trials)
		require.True(t, s.stats.Dense)
	}
}

// A first step that takes long, because ranks have to connect, does not make the
// tensor one whose steps are slow.
func TestAutoConnectsFirst(t *testing.T) {
	const n = 200_000
	connect := func(c comm.Communicator) comm.Communicator {
		connected := false
		return standin.Pace(c, func(call comm.Call) time.Duration {
			if call.Op != comm.OpAllGather || call.Count < 1000 || connected {
				return 0
			}
			connected = true
			return 200 * time.Millisecond
		})
	}
	require.Equal(t, n, runAuto(t, 2, n, 1, engine.Config{Density: 0.01}, connect)[0][0].choice.Elements)
}

// A link that takes a microsecond for an element sees neither whole dense steps, which would take
// two seconds, nor whole sparse ones, and choosing takes less than a second.
func TestAutoSparesSlowLinks(t *testing.T) {
	const ranks, n = 3, 1 << 20
	var took [ranks]time.Duration
	slow := func(c comm.Communicator) comm.Communicator {
		return standin.Pace(c, func(call comm.Call) time.Duration {
			took[c.Rank()] += time.Duration(call.Count) * time.Microsecond
			return time.Duration(call.Count) * time.Microsecond
		})
	}
	for rank, s := range runAuto(t, ranks, n, 1, engine.Config{Density: 0.1}, slow)[0] {
		choice := s.choice
		assert.NotEqual(t, sparsity.Dense, choice.Pattern)
		assert.Less(t, choice.Elements, n)
		assert.Equal(t, (choice.Elements+5)/10, choice.K)
		dense := func(t engine.Trial) bool { return t.Pattern == sparsity.Dense }
		assert.False(t, slices.ContainsFunc(choice.Trials, dense), "%v", choice.Trials)
		assert.Less(t, took[rank]-time.Duration(s.stats.SentElements)*time.Microsecond, time.Second)
	}
}

// On a device with streams the host runs ahead, and steps are timed in batches.
func TestAutoWithStreams(t *testing.T) {
	const n = 20_000
	rt := standin.NewOnStream(cpu.New())
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		s, err := engine.New(rt, standin.NewOrdered(ctx, c), n, engine.Config{Pattern: sparsity.Auto, Density: 0.02})
		require.NoError(t, err)
		g, err := runtime.FromSlice(rt, standin.Normal(n, c.Rank()))
		require.NoError(t, err)
		require.NoError(t, s.AllReduce(ctx, g))
		for _, trial := range s.Choice().Trials {
			assert.Positive(t, trial.Time, trial.Pattern)
		}
		return errors.Join(s.Close(), g.Free())
	}))
	require.NoError(t, rt.Close())
}

// Where nothing or most is to be sent, nothing is measured.
func TestAutoWithoutTrials(t *testing.T) {
	for _, k := range []struct {
		ranks, n int
		density  float64
	}{{1, 1000, 0.01}, {2, 0, 0.1}, {2, 1, 0.1}, {3, 1000, 0.5}} {
		for _, s := range runAuto(t, k.ranks, k.n, 2, engine.Config{Density: k.density}, plainComm)[1] {
			assert.Equal(t, sparsity.Dense, s.choice.Pattern)
			assert.Empty(t, s.choice.Trials)
		}
	}
}

// Dense steps of a schedule choose nothing.
func TestAutoAfterWarmup(t *testing.T) {
	cfg := engine.Config{Density: 0.05, Schedule: engine.Schedule{WarmupSteps: 2, Densities: []float64{0, 0.1}, StepsPerEpoch: 1}}
	steps := runAuto(t, 2, 5000, 5, cfg, plainComm)
	assert.Nil(t, steps[1][0].choice)
	assert.True(t, steps[1][0].stats.Dense)
	assert.NotNil(t, steps[2][0].choice)
	assert.Equal(t, steps[2][0].choice, steps[4][0].choice)
}

// One line of the log says what was chosen.
func TestAutoLogs(t *testing.T) {
	var text bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&text, nil)))
	defer slog.SetDefault(before)
	runAuto(t, 3, 3000, 3, engine.Config{Density: 0.05}, plainComm)
	assert.Equal(t, 1, bytes.Count(text.Bytes(), []byte("chose a pattern")))
	assert.Regexp(t, `pattern=\w+ elements=3000 density=0.05 ranks=3 trials="\[.*topkA .*s.*\]" took=`, text.String())
}

// A state takes the choice along: nothing is measured again, and the bits are the
// same. One of another configuration is refused, and changes nothing.
func TestAutoResumes(t *testing.T) {
	const n, ranks = 30_000, 2
	cfg := engine.Config{Pattern: sparsity.Auto, Density: 0.02}
	// Dense would be slow, so that the state has a residual.
	b := standin.Backend(t, ranks)
	require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		c := standin.Pace(r.Comm, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce && call.Count > 100 {
				return 5 * time.Millisecond
			}
			return 0
		})
		g, err := runtime.New(r.Runtime, dtype.F32, n)
		if err != nil {
			return err
		}
		defer g.Free()
		step := func(s *engine.Reducer, number int) []float32 {
			err := errors.Join(runtime.CopyIn(g, standin.Normal(n, r.Comm.Rank(), number)), s.AllReduce(ctx, g))
			assert.NoError(t, err)
			result, err := runtime.ToSlice[float32](g)
			assert.NoError(t, err)
			return result
		}
		first, err := engine.New(r.Runtime, c, n, cfg)
		if err != nil {
			return err
		}
		defer first.Close()
		for number := range 3 {
			step(first, number)
		}
		state, err := first.State(ctx)
		if err != nil {
			return err
		}
		other := cfg
		other.Density = 0.03
		stranger, err := engine.New(r.Runtime, c, n, other)
		if err != nil {
			return err
		}
		defer stranger.Close()
		assert.ErrorIs(t, stranger.Restore(ctx, state), comm.ErrMismatch)
		_, err = stranger.Residual()
		assert.ErrorIs(t, err, comm.ErrUnsupported, "still nothing is chosen")

		second, err := engine.New(r.Runtime, c, n, cfg)
		if err != nil {
			return err
		}
		defer second.Close()
		if err := second.Restore(ctx, state); err != nil {
			return err
		}
		for number := 3; number < 6; number++ {
			assert.Equal(t, hostmem.Bytes(step(first, number)), hostmem.Bytes(step(second, number)))
		}
		one, err := first.Stats(ctx)
		assert.NoError(t, err)
		two, err := second.Stats(ctx)
		assert.NoError(t, err)
		assert.Equal(t, one.Chosen, two.Chosen)
		assert.Empty(t, second.Choice().Trials, "nothing was measured")
		return nil
	}))
}

// A peer that leaves, or a context that ends, ends the choosing.
func TestAutoFails(t *testing.T) {
	rt := cpu.New()
	left := errors.New("left")
	err := local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		s, err := engine.New(rt, c, 1000, engine.Config{Pattern: sparsity.Auto, Density: 0.1})
		if err != nil {
			return err
		}
		defer s.Close()
		if c.Rank() == 2 {
			return left
		}
		g, err := runtime.FromSlice(rt, standin.Normal(1000, 1))
		if err != nil {
			return err
		}
		defer g.Free()
		assert.ErrorIs(t, s.AllReduce(ctx, g), comm.ErrPeerFailed)
		return c.Close()
	})
	assert.ErrorIs(t, err, left)
}

// TestChoiceIsUndone: a step that fails takes the choice that it began with back, so
// that all ranks choose again, also those that the failure kept from choosing; and a
// state from before the choice takes it back.
func TestChoiceIsUndone(t *testing.T) {
	const n, ranks = 20_000, 2
	others, err := local.New(ranks)
	require.NoError(t, err)
	standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f := standin.NewFaulty(standin.Pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce && call.Count > 100 {
				return 5 * time.Millisecond
			}
			return 0
		}))
		u, err := standin.NewTrainee(rt, f, engine.Config{Pattern: sparsity.Auto, Density: 0.02}, n)
		require.NoError(t, err)
		virgin, err := u.S.State(ctx)
		require.NoError(t, err)
		require.NoError(t, u.Load(0))
		given := standin.Bits(u.T)
		failing := &lastCall{Communicator: f, sparse: u.S}
		require.NoError(t, u.S.Rebind(failing))
		failing.armed = true
		assert.ErrorIs(t, u.S.AllReduce(ctx, u.T), standin.ErrFault)
		assert.True(t, failing.made, "the choice was made before the fault")
		standin.SameBits(t, given, standin.Bits(u.T))
		stats, err := u.S.Stats(ctx)
		require.NoError(t, err)
		assert.Empty(t, stats.Chosen)
		_, err = u.S.Residual()
		assert.ErrorIs(t, err, comm.ErrUnsupported, "nothing is chosen")
		state, err := u.S.State(ctx)
		require.NoError(t, err)
		assert.Equal(t, virgin, state)
		require.NoError(t, errors.Join(c.Close(), u.S.Rebind(others[c.Rank()]), u.S.AllReduce(ctx, u.T)))
		stats, err = u.S.Stats(ctx)
		require.NoError(t, err)
		assert.NotEmpty(t, stats.Chosen)
		require.NoError(t, u.S.Restore(ctx, virgin))
		_, err = u.S.Residual()
		assert.ErrorIs(t, err, comm.ErrUnsupported, "nothing is chosen any more")
		require.NoError(t, u.Step(ctx, 0))
		return errors.Join(u.Close(), others[c.Rank()].Close())
	})
}

// TestChoiceWithoutMemory: where there is no memory to undo steps of the pattern that was
// chosen, the step fails, and those that follow can be rolled back.
func TestChoiceWithoutMemory(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		f := standin.NewFaulty(standin.Pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce && call.Count > 100 {
				return 5 * time.Millisecond
			}
			return 0
		}))
		scarce := &scarce{Runtime: rt}
		u, err := standin.NewTrainee(scarce, f, engine.Config{Pattern: sparsity.Auto, Density: 0.02}, 20_000)
		require.NoError(t, err)
		scarce.left, scarce.sparse = 1, u.S
		assert.ErrorIs(t, u.Step(ctx, 0), runtime.ErrOutOfMemory)
		require.NoError(t, u.Step(ctx, 0))
		before := u.State()
		f.Calls, f.At = 0, 0
		assert.ErrorIs(t, u.Step(ctx, 1), standin.ErrFault)
		standin.SameBits(t, before, u.State())
		return u.Close()
	})
}

// scarce has memory for n allocations when a pattern has been chosen, and then for all but one.
type scarce struct {
	*cpu.Runtime
	sparse *engine.Reducer
	left   int
}

func (s *scarce) Allocate(n int) (uintptr, error) {
	if s.sparse != nil {
		if _, err := s.sparse.Residual(); !errors.Is(err, comm.ErrUnsupported) {
			if s.left--; s.left < 0 {
				s.sparse = nil
				return 0, runtime.ErrOutOfMemory
			}
		}
	}
	return s.Runtime.Allocate(n)
}

// lastCall fails the wait of a step in which the pattern has been chosen.
type lastCall struct {
	comm.Communicator
	sparse      *engine.Reducer
	armed, made bool
}

func (l *lastCall) Sync(ctx context.Context) error {
	if _, unchosen := l.sparse.Residual(); l.armed && unchosen == nil {
		l.armed, l.made = false, true
		return standin.ErrFault
	}
	return l.Communicator.Sync(ctx)
}

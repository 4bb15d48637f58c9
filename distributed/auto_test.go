package distributed_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// noticed is a communicator that has each call looked at before it is made.
type noticed struct {
	comm.Methods
	comm.Wrapped
}

func notice(c comm.Communicator, look func(call comm.Call)) comm.Communicator {
	p := &noticed{Wrapped: comm.Wrap(c)}
	p.Methods = comm.Methods{
		Do: func(call comm.Call) error {
			look(call)
			return call.Make(c)
		},
		Together: func(calls []comm.Call) error {
			for _, call := range calls {
				look(call)
			}
			return c.Group(calls...)
		},
	}
	return p
}

// pace says what calls take, beside a microsecond each: when the ranks agree on the
// time of a step that Auto measures, it puts that in its place. So a choice does not
// depend on how fast and how busy the machine is.
func pace(c comm.Communicator, takes func(call comm.Call) time.Duration) comm.Communicator {
	var step atomic.Int64
	return notice(c, func(call comm.Call) {
		if call.Op == comm.OpAllReduce && call.DType == dtype.F64 && call.Reduce == comm.Max {
			hostmem.Slice[float64](call.Send, 1)[0] = time.Duration(step.Swap(0)).Seconds()
			return
		}
		step.Add(int64(time.Microsecond + takes(call)))
	})
}

// autoStep is what a step of Auto did on a rank.
type autoStep struct {
	result []float32
	stats  distributed.StepStats
}

// runAuto makes steps of Auto on communicators that wrap makes, and returns what
// they did, by step and rank.
func runAuto(t *testing.T, ranks, n, steps int, cfg distributed.Config, wrap func(c comm.Communicator) comm.Communicator) [][]autoStep {
	t.Helper()
	cfg.Pattern = distributed.Auto
	all := make([][]autoStep, steps)
	for i := range all {
		all[i] = make([]autoStep, ranks)
	}
	b := backend(t, ranks)
	require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		s, err := distributed.NewSparse(r.Runtime, wrap(r.Comm), n, cfg)
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
			if err := runtime.CopyIn(tensor, normal(n, r.Comm.Rank(), step)); err != nil {
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
			all[step][r.Comm.Rank()] = autoStep{result, stats}
		}
		return errors.Join(s.Close(), tensor.Free())
	}))
	return all
}

func plainComm(c comm.Communicator) comm.Communicator { return c }

// Whatever a rank measures, all ranks choose the same, from a bounded number of
// trials, and use it in every step.
func TestAutoAgrees(t *testing.T) {
	const n = 20_000
	cfg := distributed.Config{Density: 0.02}
	for _, ranks := range []int{2, 3, 5} {
		steps := runAuto(t, ranks, n, 3, cfg, plainComm)
		choice := steps[0][0].stats.Choice
		require.NotNil(t, choice)
		assert.Contains(t, distributed.Patterns(), choice.Pattern)
		assert.Equal(t, n, choice.Elements)
		assert.Equal(t, n/50, choice.K)
		assert.LessOrEqual(t, len(choice.Trials), len(distributed.Patterns()))
		for _, step := range steps {
			for rank, s := range step {
				require.Equal(t, choice.Pattern, s.stats.Choice.Pattern, "rank %d of %d", rank, ranks)
				require.Equal(t, choice.Trials, s.stats.Choice.Trials, "they agreed on the times")
				require.Equal(t, hostmem.Bytes(step[0].result), hostmem.Bytes(s.result))
				if choice.Pattern != distributed.Oktopk { // which may use another
					require.Equal(t, choice.Pattern, s.stats.Pattern)
				}
			}
		}
	}
}

// Where a dense step's call takes 10 ms longer than any other, a sparse pattern is
// chosen, and where all calls but that take 2 ms longer, the dense one.
func TestAutoChooses(t *testing.T) {
	const ranks, n = 2, 100_000
	cfg := distributed.Config{Density: 0.01}
	slow := func(c comm.Communicator) comm.Communicator {
		return pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce {
				return time.Duration(call.Count) * 100 * time.Nanosecond
			}
			return 0
		})
	}
	for _, s := range runAuto(t, ranks, n, 1, cfg, slow)[0] {
		require.NotEqual(t, distributed.Dense, s.stats.Choice.Pattern, "%v", s.stats.Choice.Trials)
		require.False(t, s.stats.Dense)
		require.Less(t, s.stats.SentElements, int64(n/10), "what was sent to choose does not count")
	}
	costly := func(c comm.Communicator) comm.Communicator {
		return pace(c, func(call comm.Call) time.Duration {
			if call.Op == comm.OpAllReduce {
				return 0
			}
			return 2 * time.Millisecond
		})
	}
	for _, s := range runAuto(t, ranks, n, 2, cfg, costly)[1] {
		require.Equal(t, distributed.Dense, s.stats.Choice.Pattern, "%v", s.stats.Choice.Trials)
		require.True(t, s.stats.Dense)
	}
}

// What small parts say of the dense step decides nothing where the whole is soon
// measured, and spares a whole that takes long.
func TestAutoMeasuresDense(t *testing.T) {
	const n = 1 << 16
	for part, want := range map[time.Duration]string{100 * time.Microsecond: distributed.Dense, time.Millisecond: ""} {
		var whole atomic.Int32
		takes := func(c comm.Communicator) comm.Communicator {
			return pace(c, func(call comm.Call) time.Duration {
				switch {
				case call.Op != comm.OpAllReduce:
					return 10 * time.Microsecond
				case call.Count == n/32: // disturbed: 41 times as much are estimated
					return part
				case call.Count == n:
					whole.Add(1)
				}
				return 0
			})
		}
		for _, s := range runAuto(t, 2, n, 1, distributed.Config{Density: 0.01}, takes)[0] {
			trials := s.stats.Choice.Trials
			dense := trials[slices.IndexFunc(trials, func(t distributed.Trial) bool { return t.Pattern == distributed.Dense })]
			assert.Equal(t, want == "", dense.Estimated, "%v", trials)
			if want != "" {
				assert.Equal(t, want, s.stats.Choice.Pattern, "%v", trials)
			} else {
				assert.Zero(t, whole.Load())
			}
		}
	}
}

// A first step that takes long, because ranks have to connect, does not make the
// tensor one whose steps are slow.
func TestAutoConnectsFirst(t *testing.T) {
	const n = 200_000
	connect := func(c comm.Communicator) comm.Communicator {
		connected := false
		return pace(c, func(call comm.Call) time.Duration {
			if call.Op != comm.OpAllGather || call.Count < 1000 || connected {
				return 0
			}
			connected = true
			return 200 * time.Millisecond
		})
	}
	require.Equal(t, n, runAuto(t, 2, n, 1, distributed.Config{Density: 0.01}, connect)[0][0].stats.Choice.Elements)
}

// What is slow because it is measured first is measured again.
func TestAutoTriesAgain(t *testing.T) {
	slow := func(c comm.Communicator) comm.Communicator {
		gathered := 0
		return pace(c, func(call comm.Call) time.Duration {
			if call.Op != comm.OpAllGather || call.Count < 1000 {
				return 100 * time.Microsecond
			}
			if gathered++; gathered <= 6 { // topkA comes first, and makes one in a step
				return 20 * time.Millisecond
			}
			return 0
		})
	}
	trials := runAuto(t, 2, 20_000, 1, distributed.Config{Density: 0.1}, slow)[0][0].stats.Choice.Trials
	first := trials[slices.IndexFunc(trials, func(t distributed.Trial) bool { return t.Pattern == distributed.TopkA })]
	assert.Less(t, first.Time, time.Millisecond, "%v", trials)
}

// What disturbs gradients that are made alone, on a device with streams, does not make
// the steps look short that are measured with them.
func TestAutoWithStreams(t *testing.T) {
	const n = 20_000
	rt := newOnStream(cpu.New())
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		calls, alone := 0, 0
		counted := notice(c, func(call comm.Call) {
			if call.Op != comm.OpAllReduce || call.DType != dtype.F64 || call.Reduce != comm.Max {
				calls++
				return
			}
			took := time.Duration(calls) * 100 * time.Microsecond
			if calls == 0 {
				if alone++; alone%3 == 0 {
					took = 20 * time.Millisecond
				}
			}
			hostmem.Slice[float64](call.Send, 1)[0], calls = took.Seconds(), 0
		})
		s, err := distributed.NewSparse(rt, newOrdered(ctx, counted), n, distributed.Config{Pattern: distributed.Auto, Density: 0.02})
		require.NoError(t, err)
		g, err := runtime.FromSlice(rt, normal(n, c.Rank()))
		require.NoError(t, err)
		require.NoError(t, s.AllReduce(ctx, g))
		stats, err := s.Stats(ctx)
		require.NoError(t, err)
		assert.Len(t, stats.Choice.Trials, len(distributed.Patterns())-1, "gaussiankconcat is gaussiank")
		for _, trial := range stats.Choice.Trials {
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
		for _, s := range runAuto(t, k.ranks, k.n, 2, distributed.Config{Density: k.density}, plainComm)[1] {
			assert.Equal(t, distributed.Dense, s.stats.Choice.Pattern)
			assert.Empty(t, s.stats.Choice.Trials)
		}
	}
}

// Dense steps of a schedule choose nothing.
func TestAutoAfterWarmup(t *testing.T) {
	cfg := distributed.Config{Density: 0.05, Schedule: distributed.Schedule{WarmupSteps: 2, Densities: []float64{0, 0.1}, StepsPerEpoch: 1}}
	steps := runAuto(t, 2, 5000, 5, cfg, plainComm)
	assert.Nil(t, steps[1][0].stats.Choice)
	assert.True(t, steps[1][0].stats.Dense)
	assert.NotNil(t, steps[2][0].stats.Choice)
	assert.Equal(t, steps[2][0].stats.Choice, steps[4][0].stats.Choice)
}

// One line of the log says what was chosen.
func TestAutoLogs(t *testing.T) {
	var text bytes.Buffer
	var mu sync.Mutex
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(newLockedBuffer(&mu, &text), nil)))
	defer slog.SetDefault(before)
	runAuto(t, 3, 3000, 3, distributed.Config{Density: 0.05}, plainComm)
	assert.Equal(t, 1, bytes.Count(text.Bytes(), []byte("chose a pattern")))
	assert.Regexp(t, `pattern=\w+ elements=3000 density=0.05 ranks=3 trials="\[.*dense .*s.*\]" took=`, text.String())
}

type lockedBuffer struct {
	mu   *sync.Mutex
	text *bytes.Buffer
}

func newLockedBuffer(mu *sync.Mutex, text *bytes.Buffer) lockedBuffer { return lockedBuffer{mu, text} }

func (l lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// A state takes the choice along: nothing is measured again, and the bits are the
// same. One of another configuration is refused, and changes nothing.
func TestAutoResumes(t *testing.T) {
	const n, ranks = 30_000, 2
	cfg := distributed.Config{Pattern: distributed.Auto, Density: 0.02}
	// Dense would be slow, so that the state has a residual.
	b := backend(t, ranks)
	require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		c := pace(r.Comm, func(call comm.Call) time.Duration {
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
		step := func(s *distributed.Sparse, number int) []float32 {
			err := errors.Join(runtime.CopyIn(g, normal(n, r.Comm.Rank(), number)), s.AllReduce(ctx, g))
			assert.NoError(t, err)
			result, err := runtime.ToSlice[float32](g)
			assert.NoError(t, err)
			return result
		}
		first, err := distributed.NewSparse(r.Runtime, c, n, cfg)
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
		stranger, err := distributed.NewSparse(r.Runtime, c, n, other)
		if err != nil {
			return err
		}
		defer stranger.Close()
		assert.ErrorIs(t, stranger.Restore(ctx, state), comm.ErrMismatch)
		_, err = stranger.Residual()
		assert.ErrorIs(t, err, comm.ErrUnsupported, "still nothing is chosen")

		second, err := distributed.NewSparse(r.Runtime, c, n, cfg)
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
		assert.Equal(t, one.Choice.Pattern, two.Choice.Pattern)
		assert.Empty(t, two.Choice.Trials, "nothing was measured")
		return nil
	}))
}

// A peer that leaves, or a context that ends, ends the choosing.
func TestAutoFails(t *testing.T) {
	rt := cpu.New()
	left := errors.New("left")
	err := local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		s, err := distributed.NewSparse(rt, c, 1000, distributed.Config{Pattern: distributed.Auto, Density: 0.1})
		if err != nil {
			return err
		}
		defer s.Close()
		if c.Rank() == 2 {
			return left
		}
		g, err := runtime.FromSlice(rt, normal(1000, 1))
		if err != nil {
			return err
		}
		defer g.Free()
		assert.ErrorIs(t, s.AllReduce(ctx, g), comm.ErrPeerFailed)
		return c.Close()
	})
	assert.ErrorIs(t, err, left)
}

// The buckets of a model that are alike have one choice, made before the first
// step, and a dense one is a plain allreduce.
func TestAutoBuckets(t *testing.T) {
	const ranks = 2
	var text bytes.Buffer
	var mu sync.Mutex
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(newLockedBuffer(&mu, &text), nil)))
	defer slog.SetDefault(before)
	b := backend(t, ranks)
	lens := []int{1000, 20_000, 20_100, 19_900}
	var patterns [ranks][]string
	require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		var params []*runtime.Tensor
		for i, n := range lens {
			p, err := runtime.FromSlice(r.Runtime, normal(n, r.Comm.Rank(), i))
			if err != nil {
				return err
			}
			defer p.Free()
			params = append(params, p)
		}
		g, err := distributed.NewGradientSync(ctx, r.Runtime, r.Comm, params, distributed.GradientConfig{
			BucketBytes: 4 * 20_000,
			DenseUpTo:   -1,
			Config:      distributed.Config{Pattern: distributed.Auto, Density: 0.01},
		})
		if err != nil {
			return err
		}
		defer g.Close()
		patterns[r.Comm.Rank()] = g.Patterns()
		for range 3 {
			if err := g.ReduceAll(ctx, params); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Equal(t, patterns[0], patterns[1])
	require.Len(t, patterns[0], len(lens))
	assert.NotContains(t, patterns[0], distributed.Auto)
	assert.Equal(t, patterns[0][0], patterns[0][1], "alike")
	assert.Equal(t, 2, bytes.Count(text.Bytes(), []byte("chose a pattern")), "for 20,000 and for 1000")
}

// Levels choose for their shares.
func TestAutoLevels(t *testing.T) {
	steps := runLevels(t, []int{2, 2}, 8001, 3, distributed.Config{Pattern: distributed.Auto, Density: 0.02})
	for _, ranks := range steps {
		checkLevels(t, ranks, 2)
		assert.NotNil(t, ranks[0].stats.Choice)
	}
}

package ddp_test

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// choosing is a communicator with a stream over which dense steps are the fastest, or
// patterns whose steps keep the host.
func choosing(ctx context.Context, c comm.Communicator, dense bool) comm.Communicator {
	return standin.NewByEvents(ctx, standin.Pace(c, func(call comm.Call) time.Duration {
		slow := call.Op != comm.OpAllReduce && call.Count > 100
		if !dense { // oktopk gathers no more than 3004 of 20,000 elements at once, topkA 4000
			slow = call.Count > 3500
		}
		if slow {
			return 3 * time.Millisecond
		}
		return 0
	}))
}

// TestRestoredBehind: a Gradients whose buckets are those of a state works on the
// gradients that it is given, with what clips them, also beside the backward pass.
func TestRestoredBehind(t *testing.T) {
	const ranks, steps = 2, 6
	clipped := sparse.Config{Pattern: sparse.Auto, Density: 0.1, ClipNorm: 1}
	standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, memory *cpu.Runtime) error {
		rt := standin.NewForking(memory)
		make := func(dense bool) *ddp.Gradients {
			t1, err := runtime.New(rt, dtype.F32, 20_000)
			require.NoError(t, err)
			defer t1.Free()
			cfg := clipped
			g, err := ddp.New(ctx, rt, choosing(ctx, c, dense), []*runtime.Tensor{t1}, ddp.Config{Config: cfg, DenseUpTo: -1})
			require.NoError(t, err)
			return g
		}
		first, second := make(false), make(true)
		t.Log(first.Patterns(), second.Patterns())
		require.NotEqual(t, first.Patterns(), second.Patterns())
		require.True(t, sparsity.NeedsHost(first.Patterns()[0]))
		step := func(g *ddp.Gradients, step int) []uint32 {
			x, err := runtime.FromSlice(rt, standin.Normal(20_000, c.Rank(), step))
			require.NoError(t, err)
			require.NoError(t, errors.Join(g.ReduceAll(ctx, []*runtime.Tensor{x}), c.Sync(ctx)))
			b := slices.Clone(standin.Bits(x))
			require.NoError(t, x.Free())
			return b
		}
		for i := range 2 {
			step(first, i)
		}
		state, err := first.State(ctx)
		require.NoError(t, err)
		require.NoError(t, second.Restore(ctx, state))
		for i := 2; i < steps; i++ {
			assert.True(t, slices.Equal(step(first, i), step(second, i)), "step %d", i)
		}
		return errors.Join(first.Close(), second.Close())
	})
}

// orderedBy notes the streams that are made to wait.
type orderedBy struct {
	standin.ByEvents
	waits *[]uintptr
}

func (o orderedBy) StreamWaitEvent(stream, _ uintptr) error {
	*o.waits = append(*o.waits, stream)
	return nil
}

// TestStateBehindAGraph: a graph that holds steps runs on the compute stream, so what
// looks at residuals on the stream of sparse buckets waits for that first, and what
// changes them is waited for.
func TestStateBehindAGraph(t *testing.T) {
	const compute, beside = standin.ComputeStream, standin.ComputeStream + 2
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, memory *cpu.Runtime) error {
		rt := standin.NewForking(memory)
		var waits []uintptr
		x, err := runtime.FromSlice(rt, standin.Normal(1000, c.Rank()))
		require.NoError(t, err)
		g, err := ddp.New(ctx, rt, orderedBy{standin.NewByEvents(ctx, c), &waits}, []*runtime.Tensor{x},
			ddp.Config{Config: sparse.Config{Pattern: "topkA", Density: 0.1}, DenseUpTo: -1})
		require.NoError(t, err)
		var state []byte
		for name, call := range map[string]func() error{
			"Stats":         func() error { _, err := g.Stats(ctx); return err },
			"ScaleResidual": func() error { return g.ScaleResidual(2) },
			"State":         func() error { state, err = g.State(ctx); return err },
			"Restore": func() error {
				state, err = g.State(ctx)
				waits = nil
				return errors.Join(err, g.Restore(ctx, state))
			},
		} {
			require.NoError(t, g.ReduceAll(ctx, []*runtime.Tensor{x}))
			waits = nil
			require.NoError(t, call(), name)
			require.NotEmpty(t, waits, name)
			assert.EqualValues(t, beside, waits[0], name)
			if name == "ScaleResidual" || name == "Restore" {
				assert.EqualValues(t, compute, waits[len(waits)-1], name)
			}
		}
		return errors.Join(g.Close(), x.Free())
	})
}

// TestRestoreOtherSteps: states of several ranks are of one step, also where all
// buckets are plain.
func TestRestoreOtherSteps(t *testing.T) {
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 3})
	for _, cfg := range []ddp.Config{{}, sparseModel} {
		var states [2][]byte
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, cfg)
			require.NoError(t, err)
			for step := range 2 {
				require.NoError(t, errors.Join(m.load(step), m.sync.ReduceAll(ctx, m.params)))
				if step == c.Rank() {
					states[step], err = m.sync.State(ctx)
					require.NoError(t, err)
				}
			}
			return m.close()
		})
		standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, cfg)
			require.NoError(t, err)
			assert.ErrorIs(t, m.sync.Restore(ctx, states[0], states[1]), comm.ErrMismatch)
			stats, err := m.sync.Stats(ctx)
			require.NoError(t, err)
			assert.Zero(t, stats.Step)
			return m.close()
		})
	}
}

// TestRestoreOtherChoice goes on with a run for which other patterns were chosen: it
// has the bits of that run.
func TestRestoreOtherChoice(t *testing.T) {
	const ranks, steps = 2, 6
	cfg := ddp.Config{Config: sparse.Config{Pattern: sparse.Auto, Density: 0.05}, DenseUpTo: -1}
	// Where dense allreduces are slow, patterns are sparse, and where all else is, dense.
	slow := func(dense bool) func(comm.Call) time.Duration {
		return func(call comm.Call) time.Duration {
			if (call.Op == comm.OpAllReduce) == dense && call.Count > 100 {
				return 3 * time.Millisecond
			}
			return 0
		}
	}
	for _, sparseFirst := range []bool{true, false} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			first, err := newModel(ctx, rt, standin.Pace(c, slow(sparseFirst)), cfg)
			require.NoError(t, err)
			second, err := newModel(ctx, rt, standin.Pace(c, slow(!sparseFirst)), cfg)
			require.NoError(t, err)
			assert.NotEqual(t, first.sync.Patterns(), second.sync.Patterns())
			step := func(m *model, step int) []uint32 {
				require.NoError(t, errors.Join(m.load(step), m.sync.ReduceAll(ctx, m.params)))
				return m.bits()
			}
			for i := range steps / 2 {
				step(first, i)
				step(second, i) // what it has is replaced
			}
			state, err := first.sync.State(ctx)
			require.NoError(t, err)
			other := cfg
			other.Density = 0.06
			third, err := newModel(ctx, rt, standin.Pace(c, slow(!sparseFirst)), other)
			require.NoError(t, err)
			before := third.sync.Patterns()
			assert.ErrorIs(t, third.sync.Restore(ctx, state), comm.ErrMismatch)
			assert.Equal(t, before, third.sync.Patterns())
			require.NoError(t, second.sync.Restore(ctx, state))
			assert.Equal(t, first.sync.Patterns(), second.sync.Patterns())
			for i := steps / 2; i < steps; i++ {
				assert.Equal(t, step(first, i), step(second, i))
			}
			return errors.Join(first.close(), second.close(), third.close())
		})
	}
}

// FuzzRestoreGradients forges states of a Gradients, with checksums that are right:
// an error, or one that goes on.
func FuzzRestoreGradients(f *testing.F) {
	tuning.Set(f, tuning.Tuning{ThresholdInterval: 3})
	for i := range 60 {
		f.Add(uint8(i%3), uint16(5*i), []byte{byte(i), 1})
	}
	f.Fuzz(func(t *testing.T, which uint8, at uint16, change []byte) {
		cfg := []ddp.Config{{}, sparseModel, {Config: sparse.Config{Pattern: sparse.Auto, Density: 0.1}}}[which%3]
		standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, cfg)
			require.NoError(t, err)
			require.NoError(t, errors.Join(m.load(0), m.sync.ReduceAll(ctx, m.params)))
			state, err := m.sync.State(ctx)
			require.NoError(t, err)
			body := state[:len(state)-4]
			copy(body[int(at)%len(body):], change)
			before, patterns := m.sync.Buckets(), m.sync.Patterns()
			err = m.sync.Restore(ctx, binary.LittleEndian.AppendUint32(body, crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli))))
			if err != nil {
				require.True(t, errors.Is(err, comm.ErrArgument) || errors.Is(err, comm.ErrMismatch), "%v", err)
				require.Equal(t, before, m.sync.Buckets())
				require.Equal(t, patterns, m.sync.Patterns())
				require.NoError(t, errors.Join(m.load(1), m.sync.ReduceAll(ctx, m.params)))
			} else {
				_ = errors.Join(m.load(1), m.sync.ReduceAll(ctx, m.params))
			}
			return m.close()
		})
	})
}

// TestStepsApart has ranks of which one has completed a step more than the other go on
// together: where a schedule is not over, that is an error until they are at one step.
func TestStepsApart(t *testing.T) {
	for _, at := range []struct {
		schedule sparse.Schedule
		says     string // of the rank that is ahead
	}{
		{sparse.Schedule{}, ""},
		{sparse.Schedule{WarmupSteps: 1}, ""},
		{sparse.Schedule{WarmupSteps: 2}, "no schedule any more"},
		{sparse.Schedule{Densities: []float64{0.5}, StepsPerEpoch: 9}, "step 2 of the schedule"},
	} {
		cfg := sparse.Config{Pattern: sparse.TopkA, Density: 0.1, Schedule: at.schedule}
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			alone, err := c.Split(ctx, c.Rank(), 0)
			require.NoError(t, err)
			u, err := standin.NewTrainee(rt, alone, engine.Config(cfg), 100)
			require.NoError(t, err)
			m, err := newModel(ctx, rt, alone, ddp.Config{Config: cfg})
			require.NoError(t, err)
			one := func() error { return u.Step(ctx, 1) }
			all := func() error { return errors.Join(m.load(1), m.sync.ReduceAll(ctx, m.params)) }
			require.NoError(t, errors.Join(one(), all()))
			sparse, err := u.S.State(ctx)
			require.NoError(t, err)
			gradients, err := m.sync.State(ctx)
			require.NoError(t, err)
			if c.Rank() == 1 {
				require.NoError(t, errors.Join(one(), all()))
			}
			require.NoError(t, errors.Join(u.S.Rebind(c), m.sync.Rebind(ctx, c)))
			for _, step := range []func() error{one, all} {
				err := step()
				if at.says == "" {
					require.NoError(t, err)
					continue
				}
				require.ErrorIs(t, err, comm.ErrMismatch)
				assert.ErrorContains(t, err, "step 1 of the schedule")
				assert.ErrorContains(t, err, at.says)
			}
			require.NoError(t, errors.Join(u.S.Restore(ctx, sparse), m.sync.Restore(ctx, gradients), one(), all()))
			return errors.Join(u.Close(), m.close(), alone.Close())
		})
	}
}

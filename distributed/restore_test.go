package distributed_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestRestoreBeforeTheChoice: what was saved before a pattern was chosen has nothing
// that was not sent, whatever the Sparse has that takes it.
func TestRestoreBeforeTheChoice(t *testing.T) {
	const n = 1000
	slowDense := func(call comm.Call) time.Duration {
		if call.Op == comm.OpAllReduce && call.Count > 100 {
			return 3 * time.Millisecond
		}
		return 0
	}
	world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		u, err := newTrainee(rt, pace(c, slowDense), distributed.Config{Pattern: distributed.Auto, Density: 0.05}, n)
		require.NoError(t, err)
		virgin, err := u.s.State(ctx)
		require.NoError(t, err)
		require.NoError(t, u.step(ctx, 0))
		require.NoError(t, u.s.Restore(ctx, virgin))
		zeros, err := runtime.New(rt, dtype.F32, n)
		require.NoError(t, err)
		require.NoError(t, errors.Join(zeros.Fill(0), u.s.AllReduce(ctx, zeros), c.Sync(ctx)))
		stats, err := u.s.Stats(ctx)
		require.NoError(t, err)
		require.NotEqual(t, distributed.Dense, stats.Pattern)
		assert.True(t, slices.Equal(make([]uint32, n), bits(zeros)), stats.Pattern)
		return errors.Join(zeros.Free(), u.close())
	})
}

// TestRestoreOfTwoChoices: states of ranks of two runs, for which different patterns
// were chosen, are refused.
func TestRestoreOfTwoChoices(t *testing.T) {
	const n = 1000
	slow := func(dense bool) func(comm.Call) time.Duration {
		return func(call comm.Call) time.Duration {
			if (call.Op == comm.OpAllReduce) == dense && call.Count > 10 {
				return 3 * time.Millisecond
			}
			return 0
		}
	}
	cfg := distributed.Config{Pattern: distributed.Auto, Density: 0.05}
	var states [2][]byte
	world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		for run := range states {
			u, err := newTrainee(rt, pace(c, slow(run == 0)), cfg, n)
			require.NoError(t, err)
			require.NoError(t, u.step(ctx, 0))
			state, err := u.s.State(ctx)
			require.NoError(t, err)
			if c.Rank() == run {
				states[run] = state
			}
			require.NoError(t, u.close())
		}
		return nil
	})
	world(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		u, err := newTrainee(rt, c, cfg, n)
		require.NoError(t, err)
		assert.ErrorIs(t, u.s.Restore(ctx, states[0], states[1]), comm.ErrMismatch)
		return u.close()
	})
}

// choosing is a communicator with a stream over which dense steps are the fastest, or
// patterns whose steps keep the host.
func choosing(ctx context.Context, c comm.Communicator, dense bool) comm.Communicator {
	return newByEvents(

		ctx, pace(c, func(call comm.Call) time.Duration {
			slow := call.Op != comm.OpAllReduce
			if !dense {
				slow = call.Op == comm.OpAllReduce || call.Op == comm.OpAllGather || call.Op == comm.OpBroadcast
			}
			if slow && call.Count > 100 {
				return 3 * time.Millisecond
			}
			return 0
		}))

}

// TestRestoredBehind: a GradientSync whose buckets are those of a state works on the
// gradients that it is given, with what clips them, also beside the backward pass.
func TestRestoredBehind(t *testing.T) {
	const ranks, steps = 2, 6
	clipped := distributed.Config{Pattern: distributed.Auto, Density: 0.1, ClipNorm: 1}
	world(t, ranks, func(ctx context.Context, c comm.Communicator, memory *cpu.Runtime) error {
		rt := newBranching(memory)
		make := func(dense bool) *distributed.GradientSync {
			t1, err := runtime.New(rt, dtype.F32, 20_000)
			require.NoError(t, err)
			defer t1.Free()
			cfg := clipped
			g, err := distributed.NewGradientSync(ctx, rt, choosing(ctx, c, dense), []*runtime.Tensor{t1}, distributed.GradientConfig{Config: cfg, DenseUpTo: -1})
			require.NoError(t, err)
			return g
		}
		first, second := make(false), make(true)
		t.Log(first.Patterns(), second.Patterns())
		require.NotEqual(t, first.Patterns(), second.Patterns())
		require.True(t, distributed.NeedsHost(first.Patterns()[0]))
		step := func(g *distributed.GradientSync, step int) []uint32 {
			x, err := runtime.FromSlice(rt, normal(20_000, c.Rank(), step))
			require.NoError(t, err)
			require.NoError(t, errors.Join(g.ReduceAll(ctx, []*runtime.Tensor{x}), c.Sync(ctx)))
			b := slices.Clone(bits(x))
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

// TestRestoredPlain: where a state's buckets are plain allreduces, all work is on the
// compute stream again, whose events order it.
func TestRestoredPlain(t *testing.T) {
	cfg := distributed.GradientConfig{Config: distributed.Config{Pattern: distributed.Auto, Density: 0.1}, DenseUpTo: -1}
	world(t, 2, func(ctx context.Context, c comm.Communicator, memory *cpu.Runtime) error {
		rt := newBranching(memory)
		x, err := runtime.FromSlice(rt, normal(20_000, c.Rank()))
		require.NoError(t, err)
		all := []*runtime.Tensor{x}
		first, err := distributed.NewGradientSync(ctx, rt, choosing(ctx, c, true), all, cfg)
		require.NoError(t, err)
		second, err := distributed.NewGradientSync(ctx, rt, choosing(ctx, c, false), all, cfg)
		require.NoError(t, err)
		require.EqualValues(t, computeStream, first.Stream())
		require.NotEqualValues(t, computeStream, second.Stream())
		state, err := first.State(ctx)
		require.NoError(t, err)
		require.NoError(t, errors.Join(second.ReduceAll(ctx, all), second.Restore(ctx, state)))
		assert.EqualValues(t, computeStream, second.Stream())
		require.NoError(t, second.ReduceAll(ctx, all))
		return errors.Join(first.Close(), second.Close(), x.Free())
	})
}

// orderedBy notes the streams that are made to wait.
type orderedBy struct {
	byEvents
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
	const compute, beside = computeStream, computeStream + 2
	world(t, 2, func(ctx context.Context, c comm.Communicator, memory *cpu.Runtime) error {
		rt := newBranching(memory)
		var waits []uintptr
		x, err := runtime.FromSlice(rt, normal(1000, c.Rank()))
		require.NoError(t, err)
		g, err := distributed.NewGradientSync(ctx, rt, orderedBy{newByEvents(ctx, c), &waits}, []*runtime.Tensor{x},
			distributed.GradientConfig{Config: distributed.Config{Pattern: "topkA", Density: 0.1}, DenseUpTo: -1})
		require.NoError(t, err)
		var state []byte
		for name, call := range map[string]func() error{
			"Stats":         func() error { _, err := g.Stats(ctx); return err },
			"BucketStats":   func() error { _, err := g.BucketStats(ctx, 0); return err },
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

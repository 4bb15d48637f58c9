package ddp_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
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
		rt := standin.NewBranching(memory)
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
		require.True(t, sparse.NeedsHost(first.Patterns()[0]))
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

// TestRestoredPlain: where a state's buckets are plain allreduces, all work is on the
// compute stream again, whose events order it.
func TestRestoredPlain(t *testing.T) {
	cfg := ddp.Config{Config: sparse.Config{Pattern: sparse.Auto, Density: 0.1}, DenseUpTo: -1}
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, memory *cpu.Runtime) error {
		rt := standin.NewBranching(memory)
		x, err := runtime.FromSlice(rt, standin.Normal(20_000, c.Rank()))
		require.NoError(t, err)
		all := []*runtime.Tensor{x}
		first, err := ddp.New(ctx, rt, choosing(ctx, c, true), all, cfg)
		require.NoError(t, err)
		second, err := ddp.New(ctx, rt, choosing(ctx, c, false), all, cfg)
		require.NoError(t, err)
		require.EqualValues(t, standin.ComputeStream, first.Stream())
		require.NotEqualValues(t, standin.ComputeStream, second.Stream())
		state, err := first.State(ctx)
		require.NoError(t, err)
		require.NoError(t, errors.Join(second.ReduceAll(ctx, all), second.Restore(ctx, state)))
		assert.EqualValues(t, standin.ComputeStream, second.Stream())
		require.NoError(t, second.ReduceAll(ctx, all))
		return errors.Join(first.Close(), second.Close(), x.Free())
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
		rt := standin.NewBranching(memory)
		var waits []uintptr
		x, err := runtime.FromSlice(rt, standin.Normal(1000, c.Rank()))
		require.NoError(t, err)
		g, err := ddp.New(ctx, rt, orderedBy{standin.NewByEvents(ctx, c), &waits}, []*runtime.Tensor{x},
			ddp.Config{Config: sparse.Config{Pattern: "topkA", Density: 0.1}, DenseUpTo: -1})
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

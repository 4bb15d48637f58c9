package main

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/examples/digits/softmax"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func reducer(b ddp.Bucket) (ddp.Reducer, error) { return newRandomK(b, 0.1) }

// TestReducer is all that a Reducer needs to find out whether it keeps the contract.
func TestReducer(t *testing.T) {
	distributedtest.RunReducer(t, commtest.Backend{Sizes: []int{1, 2, 3}, Run: runWorld}, reducer)
}

// runWorld makes a world and calls body for each rank.
func runWorld(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
	return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		return errors.Join(body(ctx, commtest.Rank{Comm: c, Runtime: rt}), rt.Close())
	})
}

// TestRandomK: k entries have the average of gradients and residuals, others 0, and in time all are sent.
func TestRandomK(t *testing.T) {
	const n, k, ranks, steps = 1000, 100, 3, 200
	require.NoError(t, runWorld(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		gradient, err := runtime.New(r.Runtime, dtype.F32, n)
		require.NoError(t, err)
		gradients := []*runtime.Tensor{gradient}
		g, err := ddp.New(ctx, r.Runtime, r.Comm, gradients, ddp.Config{Reducer: reducer})
		require.NoError(t, err)
		waits := make([]float32, n) // how many steps of it
		for step := range steps {
			require.NoError(t, gradient.Fill(float64(r.Comm.Rank()+1)))
			require.NoError(t, g.ReduceAll(ctx, gradients))
			x, err := cpu.Slice[float32](gradient)
			require.NoError(t, err)
			sent := 0
			for i, v := range x {
				waits[i]++
				if v != 0 {
					require.Equal(t, 2*waits[i], v, "step %d, element %d", step, i)
					waits[i] = 0
					sent++
				}
			}
			require.Equal(t, k, sent)
		}
		for i, w := range waits {
			require.Less(t, w, float32(steps), "element %d was never sent", i)
		}
		return errors.Join(g.Close(), gradient.Free())
	}))
}

// TestAllocations: steps allocate nothing.
func TestAllocations(t *testing.T) {
	const rounds, steps = 5, 20
	perStep := math.Inf(1)
	require.NoError(t, runWorld(t.Context(), 2, func(ctx context.Context, r commtest.Rank) error {
		gradient, err := runtime.New(r.Runtime, dtype.F32, 1000)
		require.NoError(t, err)
		gradients := []*runtime.Tensor{gradient}
		g, err := ddp.New(ctx, r.Runtime, r.Comm, gradients, ddp.Config{Reducer: reducer})
		require.NoError(t, err)
		step := func() { err = errors.Join(err, g.ReduceAll(ctx, gradients)) }
		for range rounds {
			if r.Comm.Rank() == 0 {
				perStep = min(perStep, testing.AllocsPerRun(steps, step))
				continue
			}
			for range steps + 1 { // AllocsPerRun adds one
				step()
			}
		}
		return errors.Join(err, g.Close(), gradient.Free())
	}))
	assert.Zero(t, perStep, "allocations per step")
}

func TestTraining(t *testing.T) {
	dense, err := softmax.Train(t.Context(), ddp.Config{})
	require.NoError(t, err)
	result, err := softmax.Train(t.Context(), ddp.Config{Reducer: reducer})
	require.NoError(t, err)
	assert.Greater(t, result.Accuracy, dense.Accuracy-0.02)
	assert.Less(t, result.Sent, dense.Sent/8)
}

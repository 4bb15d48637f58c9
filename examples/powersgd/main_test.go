package main

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti"
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

func reducer(b ddp.Bucket) (ddp.Reducer, error) { return newPowerSGD(b, 4) }

// TestReducer is all that a Reducer needs to check that it keeps the contract.
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

// TestPowerSGDErrorFeedback checks properties from Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient
// Compression for Distributed Optimization", NeurIPS 2019. An average of rank 4 or less, and a vector, are sent
// exactly in the first step. Other averages are sent over time by error feedback.
func TestPowerSGDErrorFeedback(t *testing.T) {
	const rows, columns, length = 30, 50, 20
	for _, of := range []struct {
		steps, rank int // of each gradient
		within      float64
	}{{1, 2, 1e-4}, {300, 10, 0.2}} {
		require.NoError(t, runWorld(t.Context(), 2, func(ctx context.Context, r commtest.Rank) error {
			matrices, average := [2][]float32{}, make([]float32, rows*columns)
			for rank := range matrices {
				random := rand.New(rand.NewPCG(7, uint64(rank)))
				matrices[rank] = make([]float32, rows*columns)
				for range of.rank {
					right := make([]float32, columns)
					for j := range right {
						right[j] = float32(random.NormFloat64())
					}
					for i := range rows {
						left := float32(random.NormFloat64())
						for j := range right {
							matrices[rank][i*columns+j] += left * right[j]
							average[i*columns+j] += left * right[j] / 2
						}
					}
				}
			}
			matrix, err := runtime.New(r.Runtime, dtype.F32, rows, columns)
			require.NoError(t, err)
			vector, err := runtime.New(r.Runtime, dtype.F32, length)
			require.NoError(t, err)
			gradients, sum := []*runtime.Tensor{matrix, vector}, make([]float64, rows*columns)
			g, err := ddp.New(ctx, r.Runtime, r.Comm, gradients, ddp.Config{Reducer: reducer})
			require.NoError(t, err)
			for range of.steps {
				require.NoError(t, runtime.CopyIn(matrix, matrices[r.Comm.Rank()]))
				require.NoError(t, vector.Fill(float64(r.Comm.Rank())))
				require.NoError(t, g.ReduceAll(ctx, gradients))
				for i, x := range got(runtime.ToSlice[float32](matrix)) {
					sum[i] += float64(x)
				}
				require.Equal(t, slices.Repeat([]float32{0.5}, length), got(runtime.ToSlice[float32](vector)))
			}
			for i, x := range average {
				require.InDelta(t, x, sum[i]/float64(of.steps), of.within, "element %d, %d steps", i, of.steps)
			}
			return errors.Join(g.Close(), matrix.Free(), vector.Free())
		}))
	}
}

func got(x []float32, _ error) []float32 { return x }

// TestAllocations checks that steps allocate nothing.
func TestAllocations(t *testing.T) {
	const rounds, steps = 5, 20
	perStep := math.Inf(1)
	require.NoError(t, runWorld(t.Context(), 2, func(ctx context.Context, r commtest.Rank) error {
		gradient, err := runtime.New(r.Runtime, dtype.F32, 25, 40)
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
	var dense, compressed softmax.Result
	require.NoError(t, tutti.Run(t.Context(), func(ctx context.Context, r tutti.Rank) error {
		plain, err := softmax.Train(ctx, r, nil, ddp.Config{})
		if err != nil {
			return err
		}
		result, err := softmax.Train(ctx, r, nil, ddp.Config{Reducer: reducer})
		if r.Comm.Rank() == 0 {
			dense = plain
			compressed = result
		}
		return err
	}))
	assert.Greater(t, compressed.Accuracy, dense.Accuracy-0.02)
	assert.Less(t, compressed.Sent, dense.Sent/2)
}

package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/stages"
	"github.com/tutti-go/tutti/runtime"
)

// TestStateOfABranch: sparse buckets that are worked on beside the compute stream are
// asked for Stats while a step's work is still in flight, and a GradientSync that was
// restored from their state goes on with their bits.
func TestStateOfABranch(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, pattern := range []string{sparse.TopkA, sparse.Gtopk, sparse.Oktopk} {
		t.Run(pattern, func(t *testing.T) {
			world, _ := ranks(t, 1, math.MaxInt)
			comms := make([]comm.Communicator, len(world))
			for i, c := range world {
				comms[i] = c
			}
			// A rank that fails ends the waits of the others.
			assert.NoError(t, comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) error {
				return restoreSteps(ctx, c.(*nccl.Comm), pattern)
			}))
		})
	}
}

func restoreSteps(ctx context.Context, c *nccl.Comm, pattern string) (err error) {
	const saved, steps = 4, 8
	rt := c.Runtime()
	lengths := []int{300_007, 50_001}
	gradients := make([]*runtime.Tensor, len(lengths))
	for i, n := range lengths {
		if gradients[i], err = runtime.FromSlice(rt, make([]float32, n)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, gradients[i].Free()) }()
	}
	cfg := ddp.Config{Config: sparse.Config{Pattern: pattern, Density: 0.01}, BucketBytes: 1 << 16, DenseUpTo: -1}
	var syncs [2]*ddp.Gradients
	for i := range syncs {
		if syncs[i], err = ddp.New(ctx, rt, c, gradients, cfg); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, syncs[i].Close()) }()
	}
	// step returns the results of all tensors.
	step := func(g *ddp.Gradients, number int) (results [][]float32, err error) {
		rng := rand.New(rand.NewPCG(uint64(c.Rank()), uint64(number)))
		for i, n := range lengths {
			values := make([]float32, n)
			for j := range values {
				values[j] = float32(rng.NormFloat64())
			}
			fresh, err := runtime.FromSlice(rt, values)
			if err != nil {
				return nil, err
			}
			if err := errors.Join(gradients[i].CopyFrom(fresh), fresh.Free()); err != nil {
				return nil, err
			}
		}
		beside := false // the buckets are selected from beside the compute stream
		observed := stages.Observe(ctx, func(_ int, _ stages.Stage, stream uintptr) {
			beside = stream != rt.ComputeStream()
		})
		if err := g.ReduceAll(observed, gradients); err != nil {
			return nil, err
		}
		if !beside {
			return nil, errors.New("sparse buckets are not beside the compute stream")
		}
		// Rank 0 is the root of gtopk's tree, and receives alone.
		if stats, err := g.Stats(ctx); err != nil || stats.Step != number || stats.SentElements == 0 && c.Rank() > 0 {
			return nil, fmt.Errorf("stats of step %d: %+v, %v", number, stats, err)
		}
		if err := c.Sync(ctx); err != nil {
			return nil, err
		}
		for i, n := range lengths {
			p, err := gradients[i].Ptr()
			if err != nil {
				return nil, err
			}
			values, err := read(rt, p, n)
			if err != nil {
				return nil, err
			}
			results = append(results, values)
		}
		return results, nil
	}
	for i := range saved {
		if _, err := step(syncs[0], i); err != nil {
			return err
		}
	}
	if _, err := step(syncs[1], 0); err != nil { // it has its own residual, which goes
		return err
	}
	state, err := syncs[0].State(ctx)
	if err != nil {
		return err
	}
	if err := syncs[1].Restore(ctx, state); err != nil {
		return err
	}
	for i := saved; i < steps; i++ {
		want, err := step(syncs[0], i)
		if err != nil {
			return err
		}
		got, err := step(syncs[1], i)
		if err != nil {
			return err
		}
		for j := range want {
			for k := range want[j] {
				if math.Float32bits(want[j][k]) != math.Float32bits(got[j][k]) {
					return fmt.Errorf("step %d, tensor %d, element %d: %v, after Restore %v", i, j, k, want[j][k], got[j][k])
				}
			}
		}
	}
	return nil
}

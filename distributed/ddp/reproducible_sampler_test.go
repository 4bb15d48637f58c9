package ddp_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A step of the regression has six microbatches of four of the samples, of which an epoch has no whole number of steps.
const (
	samplerSeed  = 29
	sampled      = 125
	features     = 100
	perBatch     = 4
	perStep      = 6
	samplerSteps = 15
)

// sampling says which samples a rank's microbatch of a step has, which counts from 0 over all ranks.
type sampling func(c comm.Communicator, rt runtime.Runtime, step, microbatch int) ([]int, error)

// sharedBatches has all ranks make the batches of one rank, as docs/same-bits.md says.
func sharedBatches(_ comm.Communicator, rt runtime.Runtime, step, microbatch int) ([]int, error) {
	s, err := distributed.NewSampler(noop.New(rt), sampled, distributed.SamplerConfig{Seed: samplerSeed})
	if err != nil {
		return nil, err
	}
	perEpoch := sampled / perBatch / perStep
	batches := s.Batches(step/perEpoch, perBatch)
	return batches[step%perEpoch*perStep+microbatch], nil
}

// batchesOfRanks has each rank take batches of its samples, which depend on the number of ranks.
func batchesOfRanks(c comm.Communicator, _ runtime.Runtime, step, microbatch int) ([]int, error) {
	s, err := distributed.NewSampler(c, sampled, distributed.SamplerConfig{Seed: samplerSeed})
	if err != nil {
		return nil, err
	}
	batches := s.Batches(step, perBatch)
	return batches[microbatch%len(batches)], nil
}

// rotated has the microbatches of a step begin elsewhere for each number of ranks.
func rotated(c comm.Communicator, rt runtime.Runtime, step, microbatch int) ([]int, error) {
	return sharedBatches(c, rt, step, (microbatch+c.WorldSize())%perStep)
}

// skipping leaves out batches of the second half of an epoch where there are several ranks.
func skipping(c comm.Communicator, rt runtime.Runtime, step, microbatch int) ([]int, error) {
	if c.WorldSize() > 1 {
		step += step / (samplerSteps / 2)
	}
	return sharedBatches(c, rt, step, microbatch)
}

// gradientOf returns the gradient of a microbatch in a linear regression of the first feature by the others.
func gradientOf(weights []float32, samples []int) []float32 {
	gradient := make([]float32, features)
	for _, i := range samples {
		x := standin.Normal(features, samplerSeed, i)
		miss := -x[0]
		for j := 1; j < features; j++ {
			miss += float32(weights[j] * x[j])
		}
		for j := 1; j < features; j++ {
			gradient[j] += float32(miss * x[j])
		}
	}
	return gradient
}

// trained makes the steps from one to another and returns the weights, of which it adds the hash after each step. With
// lost, the last step fails, as the last rank is lost in it.
func trained(t *testing.T, ranks int, lost bool, share sampling, from, until int, before []float32,
	hashes map[int]string,
) (after []float32) {
	var ready sync.WaitGroup // ranks that have handed over their gradients of the last step
	ready.Add(ranks)
	standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		weights := append([]float32{}, before...)
		x, err := runtime.New(rt, dtype.F32, features)
		require.NoError(t, err)
		g, err := ddp.New(ctx, rt, c, []*runtime.Tensor{x}, ddp.Config{Reproducible: perStep})
		require.NoError(t, err)
		for step := from; step < until; step++ {
			end := (c.Rank() + 1) * perStep / ranks
			for m := c.Rank() * perStep / ranks; m < end; m++ {
				samples, err := share(c, rt, step, m)
				require.NoError(t, err)
				require.NoError(t, runtime.CopyIn(x, gradientOf(weights, samples)))
				if m < end-1 {
					require.NoError(t, g.Accumulate(0, x))
				} else {
					require.NoError(t, g.Ready(ctx, 0, x))
				}
			}
			if lost && step == until-1 { // the step is another world's
				ready.Done()
				if c.Rank() == ranks-1 {
					ready.Wait()
					comm.AbortAll(c, errors.New("killed"))
				}
				require.Error(t, g.Wait(ctx))
				break
			}
			require.NoError(t, g.Wait(ctx))
			mean, err := values(g.Result(0))
			require.NoError(t, err)
			for j := range weights {
				weights[j] -= float32(mean[j] / 64)
			}
			if c.Rank() == 0 {
				hashes[step] = fmt.Sprintf("%x", sha256.Sum256(fmt.Append(nil, weights)))
			}
		}
		if c.Rank() == 0 {
			after = weights
		}
		return errors.Join(g.Close(), x.Free())
	})
	return after
}

// churned makes all steps in worlds that follow each other, of which some lose a rank in the middle of a step.
func churned(t *testing.T, share sampling) (hashes map[int]string) {
	random := rand.New(rand.NewPCG(samplerSeed, 1))
	hashes = map[int]string{}
	weights := make([]float32, features)
	for step := 0; step < samplerSteps; {
		ranks := []int{1, 2, 3, 4, 6}[random.IntN(5)]
		lost := ranks > 1 && random.IntN(2) == 0
		until := min(step+1+random.IntN(3), samplerSteps)
		weights = trained(t, ranks, lost, share, step, until, weights, hashes)
		step = until
		if lost {
			step--
		}
	}
	return hashes
}

// Weights are the same after each step for 1, 2, 3, 4 and 6 ranks, and where ranks come and are lost, by the batches
// that the documentation has them share. Samplers by which it counts who computes what give other weights.
func TestReproducibleSampler(t *testing.T) {
	run := func(ranks int, share sampling) map[int]string {
		hashes := map[int]string{}
		trained(t, ranks, false, share, 0, samplerSteps, make([]float32, features), hashes)
		return hashes
	}
	want := run(1, sharedBatches)
	require.Len(t, want, samplerSteps)
	for _, ranks := range []int{2, 3, 4, 6} {
		assert.Equal(t, want, run(ranks, sharedBatches), "%d ranks", ranks)
	}
	assert.Equal(t, want, churned(t, sharedBatches), "ranks that come and go, seed %d", samplerSeed)

	for name, mutant := range map[string]sampling{
		"batches of ranks": batchesOfRanks,
		"left out":         skipping,
	} {
		alone := run(1, mutant)
		for _, ranks := range []int{2, 3, 4, 6} {
			assert.NotEqual(t, alone, run(ranks, mutant), "%s, %d ranks", name, ranks)
		}
		assert.NotEqual(t, alone, churned(t, mutant), name)
	}
	// The same microbatches in another order are the same contributions.
	for _, ranks := range []int{1, 2, 3, 4, 6} {
		assert.Equal(t, want, run(ranks, rotated), "%d ranks, in another order", ranks)
	}
}

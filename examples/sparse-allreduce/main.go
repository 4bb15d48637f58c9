// Command sparse-allreduce averages a gradient over some ranks and sends only
// the largest 5 % of the entries per step. What is not sent stays in a residual on its
// rank (error feedback) and is sent later, so the sum of the results approaches
// the dense one.
//
//	go run ./examples/sparse-allreduce          # four ranks on the host
//	go run ./examples/sparse-allreduce -gpus 2  # a rank on each of two GPUs, over NCCL
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math"
	"math/rand/v2"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

const (
	elements = 100_000
	steps    = 200
)

func main() {
	gpus := flag.Uint("gpus", 0, "number of GPUs, a rank on each; 0 for four ranks on the host")
	flag.Parse()
	var err error
	if ctx := context.Background(); *gpus == 0 {
		err = onHost(ctx, 4)
	} else {
		err = onGPUs(ctx, *gpus)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// onHost has the ranks in the host's memory, all of which share a runtime.
func onHost(ctx context.Context, ranks int) error {
	rt := cpu.New()
	err := local.Run(ctx, ranks, func(ctx context.Context, c comm.Communicator) error { return compare(ctx, rt, c) })
	return errors.Join(err, rt.Close())
}

// onGPUs has a rank on each GPU.
func onGPUs(ctx context.Context, gpus uint) error {
	var runtimes []*cuda.Runtime
	for i := range gpus {
		rt, err := cuda.Open(int(i))
		if err != nil {
			return err
		}
		defer rt.Close()
		runtimes = append(runtimes, rt)
	}
	world, err := nccl.InProcess(ctx, runtimes)
	if err != nil {
		return err
	}
	var ranks []comm.Communicator
	for _, c := range world {
		ranks = append(ranks, c)
	}
	return comm.Run(ctx, ranks, func(ctx context.Context, c comm.Communicator) error { return compare(ctx, runtimes[c.Rank()], c) })
}

// compare trains in three ways. It is the same on hosts and GPUs.
func compare(ctx context.Context, rt runtime.Runtime, c comm.Communicator) error {
	print := func(format string, values ...any) {
		if c.Rank() == 0 {
			fmt.Printf(format, values...)
		}
	}
	print("%d ranks average the same gradients of %d elements in each of %d steps.\n\n", c.WorldSize(), elements, steps)
	print("%-30s %24s %24s\n", "", "elements sent per step", "error of the sum so far")
	for _, run := range []struct {
		label string
		cfg   sparse.Config
	}{
		{"dense", sparse.Config{}},
		{"oktopk, 5 %", sparse.Config{Pattern: sparse.Oktopk, Density: 0.05}},
		{"oktopk, 5 %, no feedback", sparse.Config{Pattern: sparse.Oktopk, Density: 0.05, NoErrorFeedback: true}},
	} {
		sent, deviation, err := train(ctx, rt, c, run.cfg)
		if err != nil {
			return err
		}
		print("%-30s %24d %22.1f %%\n", run.label, sent/steps, 100*deviation)
	}
	return nil
}

// train adds up the averaged gradients of all steps, as an optimizer does, and
// compares the sum with the exact one. It returns how many elements this rank
// sent and how far the sum is off, relative to its norm.
func train(ctx context.Context, rt runtime.Runtime, c comm.Communicator, cfg sparse.Config) (sent int64, deviation float64, err error) {
	sparse, err := sparse.New(rt, c, elements, cfg)
	if err != nil {
		return 0, 0, err
	}
	tensor, err := runtime.New(rt, dtype.F32, elements)
	if err != nil {
		return 0, 0, err
	}
	sum := make([]float32, elements)
	average := make([]float32, elements)
	for range steps {
		if err := runtime.CopyIn(tensor, gradient(c.Rank())); err != nil {
			return 0, 0, err
		}
		if err := sparse.AllReduce(ctx, tensor); err != nil {
			return 0, 0, err
		}
		if err := runtime.CopyOut(average, tensor); err != nil {
			return 0, 0, err
		}
		for i, x := range average {
			sum[i] += x
		}
		stats, err := sparse.Stats(ctx)
		if err != nil {
			return 0, 0, err
		}
		sent += stats.SentElements
	}
	exact := make([]float64, elements)
	for rank := range c.WorldSize() {
		for i, g := range gradient(rank) {
			exact[i] += float64(g) * steps / float64(c.WorldSize())
		}
	}
	var off, norm float64
	for i, x := range exact {
		off += (float64(sum[i]) - x) * (float64(sum[i]) - x)
		norm += x * x
	}
	return sent, math.Sqrt(off / norm), errors.Join(sparse.Close(), tensor.Free())
}

// gradient returns a rank's gradient: normal noise.
func gradient(rank int) []float32 {
	rng := rand.New(rand.NewPCG(1, uint64(rank)))
	g := make([]float32, elements)
	for i := range g {
		g[i] = float32(rng.NormFloat64())
	}
	return g
}

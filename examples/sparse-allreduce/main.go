// Command sparse-allreduce averages a gradient over the ranks and sends only the largest 5 % of the entries per step.
// The other entries stay in a residual on their rank (error feedback) and are sent later, so the sum of the results
// approaches the dense one. selector.go selects entries by other criteria.
//
//	go run ./examples/sparse-allreduce                     # four ranks on the host
//	TUTTI_BACKEND=nccl go run ./examples/sparse-allreduce  # a rank on each GPU
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math"
	"math/rand/v2"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

const (
	elements = 100_000
	steps    = 200
)

func main() {
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if err := tutti.Run(context.Background(), compare); err != nil {
		log.Fatal(err)
	}
}

// compare trains in four ways, on hosts and GPUs alike.
func compare(ctx context.Context, r tutti.Rank) error {
	print := func(format string, values ...any) {
		if r.Comm.Rank() == 0 {
			fmt.Printf(format, values...)
		}
	}
	print("%d ranks average the same gradients of %d elements in each of %d steps.\n\n",
		r.Comm.WorldSize(), elements, steps)
	print("%-30s %24s %24s\n", "", "elements sent per step", "error of the sum so far")
	for _, run := range []struct {
		label string
		cfg   sparse.Config
	}{
		{"dense", sparse.Config{}},
		{"oktopk, 5 %", sparse.Config{Pattern: sparse.Oktopk, Density: 0.05}},
		{"oktopk, 5 %, no feedback", sparse.Config{
			Pattern:         sparse.Oktopk,
			Density:         0.05,
			NoErrorFeedback: true,
		}},
		{"random, 5 %", sparse.Config{Pattern: sparse.TopkA, Density: 0.05, Selector: random{}}},
	} {
		sent, deviation, err := train(ctx, r, run.cfg)
		if err != nil {
			return err
		}
		print("%-30s %24d %22.1f %%\n", run.label, sent/steps, 100*deviation)
	}
	return nil
}

// train sums the averaged gradients of all steps, as an optimizer does, and compares the sum with the exact one. It
// returns the number of elements that this rank sent, and the error of the sum relative to its norm.
func train(ctx context.Context, r tutti.Rank, cfg sparse.Config) (sent int64, deviation float64, err error) {
	sparse, err := sparse.New(r.Runtime, r.Comm, elements, cfg)
	if err != nil {
		return 0, 0, err
	}
	tensor, err := runtime.New(r.Runtime, dtype.F32, elements)
	if err != nil {
		return 0, 0, err
	}
	sum := make([]float32, elements)
	average := make([]float32, elements)
	for range steps {
		if err := runtime.CopyIn(tensor, gradient(r.Comm.Rank())); err != nil {
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
	for rank := range r.Comm.WorldSize() {
		for i, g := range gradient(rank) {
			exact[i] += float64(g) * steps / float64(r.Comm.WorldSize())
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

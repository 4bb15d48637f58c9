// Command gradients trains a softmax regression on digits, data parallel: docs/tutorial.md explains it line by line.
//
//	go run ./examples/gradients                    # four ranks, goroutines of one process
//	go run ./examples/gradients -pattern oktopk    # the largest entries of gradients only
//	tutti launch -n 4 ./gradients                  # four ranks, processes
package main

import (
	"context"
	"flag"
	"fmt"
	"hash/crc32"
	"log"
	"time"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/examples/digits"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

var (
	pattern = flag.String("pattern", sparse.Dense, "how gradients are exchanged")
	epochs  = flag.Int("epochs", 10, "how often to see all images")
)

func main() {
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if err := tutti.Run(context.Background(), train); err != nil {
		log.Fatal(err)
	}
}

// train is one rank.
func train(ctx context.Context, r tutti.Rank) error {
	const batch, rate = 16, 0.5
	r.Comm = comm.Limit(r.Comm, time.Minute, nil) // no wait takes longer
	training, test, err := digits.Split(1)
	if err != nil {
		return err
	}
	// A matrix is wrapped with its shape: vectors are always reduced densely.
	weights := make([]float32, digits.Pixels*digits.Classes)
	parameters, err := cpu.Wrap(r.Runtime, weights, digits.Pixels, digits.Classes)
	if err != nil {
		return err
	}
	defer parameters.Free()
	gradient := make([]float32, len(weights))
	tensor, err := cpu.Wrap(r.Runtime, gradient, digits.Pixels, digits.Classes)
	if err != nil {
		return err
	}
	defer tensor.Free()
	sync, err := ddp.New(ctx, r.Runtime, r.Comm, []*runtime.Tensor{parameters}, ddp.Config{
		Config: sparse.Config{Pattern: *pattern, Density: 0.1},
	})
	if err != nil {
		return err
	}
	defer sync.Close()
	sampler, err := distributed.NewSampler(r.Comm, training.Len(), distributed.SamplerConfig{Seed: 1})
	if err != nil {
		return err
	}
	for epoch := range *epochs {
		for _, images := range sampler.Batches(epoch, batch) {
			clear(gradient)
			for _, i := range images { // this rank's share of the batch
				digits.Descend(gradient, weights, training.Image(i), training.Labels[i], 1.0/batch)
			}
			if err := sync.ReduceAll(ctx, []*runtime.Tensor{tensor}); err != nil {
				return err
			}
			for i, g := range gradient { // the average over all ranks
				weights[i] -= rate * g
			}
		}
	}
	hash := crc32.ChecksumIEEE(fmt.Append(nil, weights))
	fmt.Printf("rank %d: test accuracy %.1f %%, weights %08x\n", r.Comm.Rank(), 100*digits.Accuracy(weights, test), hash)
	return nil
}

// Command digits trains a Gorgonia network to recognize digits, on several ranks. The adapter's README shows the
// changes that made it data parallel.
//
//	go run ./digits                       # four ranks, goroutines of one process
//	go build -o program ./digits
//	tutti launch -n 4 ./program           # a process per rank, on one machine or several: the same bits
//	mpirun --bind-to none -n 4 ./program  # under MPI as well
package main

import (
	"context"
	"flag"
	"fmt"
	"hash/crc32"
	"log"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/adapters/gorgonia"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/examples/digits"
)

func main() {
	backend := flag.String("backend", "", "local, tcp or mpi; unset: as the launcher says")
	ranks := flag.Int("ranks", 0, "ranks of the local backend; 0 is 4")
	epochs := flag.Int("epochs", 4, "how often to see all images")
	density := flag.Float64("density", 1, "share of the gradient's entries that is sent; below 1 by topkA")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if *epochs < 1 {
		log.Fatalf("-epochs is %d, want 1 or more", *epochs)
	}
	if !(*density > 0 && *density <= 1) { // NaN as well
		log.Fatalf("-density is %v, want a share above 0 and at most 1", *density)
	}
	cfg := ddp.Config{}
	if *density < 1 {
		cfg.Config = sparse.Config{Pattern: sparse.TopkA, Density: *density}
	}
	world := tutti.Config{
		Backend: *backend,
		Ranks:   *ranks,
	}
	err := world.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		return run(ctx, r.Comm, *epochs, cfg)
	})
	if err != nil {
		log.Fatal(err)
	}
}

const batch = 16 // images of a rank in a step

// run trains as one rank.
func run(ctx context.Context, c comm.Communicator, epochs int, cfg ddp.Config) error {
	training, test, err := digits.Split(1)
	if err != nil {
		return err
	}
	m, err := newModel(uint64(c.Rank())) // rank 0's parameters win
	if err != nil {
		return err
	}
	machine := G.NewTapeMachine(m.graph, G.BindDualValues(m.parameters...))
	defer machine.Close()
	solver, err := gorgonia.New(ctx, c, G.NewAdamSolver(G.WithLearnRate(0.01)), m.parameters, cfg)
	if err != nil {
		return err
	}
	defer solver.Close()
	sampler, err := distributed.NewSampler(c, training.Len(), distributed.SamplerConfig{Seed: 1})
	if err != nil {
		return err
	}
	for epoch := range epochs {
		for _, images := range sampler.Batches(epoch, batch) {
			if len(images) < batch { // the graph has a fixed batch size
				continue
			}
			m.fill(training, images)
			if err := machine.RunAll(); err != nil {
				return err
			}
			if err := solver.Step(G.NodesToValueGrads(m.parameters)); err != nil {
				return err
			}
			machine.Reset()
		}
	}
	if c.Rank() == 0 {
		sum := crc32.NewIEEE()
		for _, p := range m.parameters {
			sum.Write(p.Value().(*tensor.Dense).Raw)
		}
		fmt.Printf("world size %d, %d epochs: test accuracy %.1f %%, checksum of the parameters %08x\n",
			c.WorldSize(), epochs, 100*m.accuracy(test), sum.Sum32())
	}
	return nil
}

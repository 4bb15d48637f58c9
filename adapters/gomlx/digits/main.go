// Command digits trains a GoMLX network to recognize digits, on several ranks. The adapter's README shows the changes
// that made it data parallel.
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
	"log"

	"github.com/gomlx/compute"
	_ "github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/adapters/gomlx"
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
	accumulate := flag.Int("accumulate", 1, "batches whose gradients are accumulated in a step")
	density := flag.Float64("density", 1, "share of the gradient's entries that is sent; below 1 by topkA")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if *epochs < 1 {
		log.Fatalf("-epochs is %d, want 1 or more", *epochs)
	}
	if *accumulate < 1 {
		log.Fatalf("-accumulate is %d, want 1 or more", *accumulate)
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
		return run(ctx, r.Comm, *epochs, *accumulate, cfg)
	})
	if err != nil {
		log.Fatal(err)
	}
}

// run trains as one rank.
func run(ctx context.Context, c comm.Communicator, epochs, accumulate int, cfg ddp.Config) error {
	backend, err := compute.NewWithConfig("go")
	if err != nil {
		return err
	}
	variables := model.NewStore()
	variables.SetParam(optimizer.ParamLearningRate, 0.01)
	if err := variables.SetRNGStateFromSeed(int64(c.Rank())); err != nil { // rank 0's seed wins
		return err
	}
	images, labels, test, err := load()
	if err != nil {
		return err
	}
	inputs := []*tensors.Tensor{images}
	targets := []*tensors.Tensor{labels}
	data, err := gomlx.NewDataset(c, "digits", inputs, targets, 16, distributed.SamplerConfig{Seed: 1})
	if err != nil {
		return err
	}
	averaging, err := gomlx.New(ctx, c, optimizer.Adam().Done(), cfg)
	if err != nil {
		return err
	}
	defer averaging.Close()
	entropy := loss.SparseCategoricalCrossEntropyLogits
	trainer := train.NewTrainer(backend, variables, perceptron, entropy, averaging, nil, nil)
	if accumulate > 1 {
		if err := trainer.AccumulateGradients(accumulate); err != nil {
			return err
		}
	}
	loop := train.NewLoop(trainer)
	averaging.Attach(loop)
	if _, err := loop.RunEpochs(data, epochs); err != nil {
		return err
	}
	if c.Rank() == 0 {
		accuracy, err := evaluate(backend, variables, test)
		if err != nil {
			return err
		}
		fmt.Printf("world size %d, %d epochs: test accuracy %.1f %%, checksum of the parameters %08x\n",
			c.WorldSize(), epochs, 100*accuracy, checksum(variables))
	}
	return nil
}

// perceptron has one hidden layer.
func perceptron(scope *model.Scope, images *graph.Node) *graph.Node {
	hidden := activation.Relu(layers.Dense(scope.In("hidden"), images, true, 32))
	return layers.Dense(scope.In("logits"), hidden, true, digits.Classes)
}

// Command digits trains a network of GoMLX to read digits, on several ranks. The
// README beside the adapter shows what made it data parallel.
//
//	go run ./digits                       # four ranks, goroutines of one process
//	mpirun -n 4 ./digits -backend mpi     # a process per rank, the same bits
package main

import (
	"context"
	"flag"
	"fmt"
	"log"

	"github.com/gomlx/gomlx/backends"
	_ "github.com/gomlx/gomlx/backends/simplego"
	"github.com/gomlx/gomlx/pkg/core/graph"
	"github.com/gomlx/gomlx/pkg/core/tensors"
	mlctx "github.com/gomlx/gomlx/pkg/ml/context"
	"github.com/gomlx/gomlx/pkg/ml/layers"
	"github.com/gomlx/gomlx/pkg/ml/layers/activations"
	"github.com/gomlx/gomlx/pkg/ml/train"
	"github.com/gomlx/gomlx/pkg/ml/train/losses"
	"github.com/gomlx/gomlx/pkg/ml/train/optimizers"

	"github.com/tutti-go/tutti/adapters/gomlx"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/examples/digits"
)

func main() {
	backend := flag.String("backend", "local", "local, or mpi under mpirun")
	ranks := flag.Int("ranks", 4, "ranks of the local backend")
	epochs := flag.Int("epochs", 4, "how often to see all images")
	accumulate := flag.Int("accumulate", 1, "batches whose gradients are accumulated in a step")
	density := flag.Float64("density", 1, "share of the gradient's entries that is sent; below 1 by topkA")
	flag.Parse()
	cfg := ddp.Config{}
	if *density < 1 {
		cfg.Config = sparse.Config{Pattern: sparse.TopkA, Density: *density}
	}
	body := func(ctx context.Context, c comm.Communicator) error {
		return run(ctx, c, *epochs, *accumulate, cfg)
	}
	var err error
	if *backend == "mpi" {
		err = mpi.Run(context.Background(), body)
	} else {
		err = local.Run(context.Background(), *ranks, body)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// run is one rank.
func run(ctx context.Context, c comm.Communicator, epochs, accumulate int, cfg ddp.Config) error {
	backend, err := backends.NewWithConfig("go")
	if err != nil {
		return err
	}
	variables := mlctx.New()
	variables.SetParam(optimizers.ParamLearningRate, 0.01)
	if err := variables.SetRNGStateFromSeed(int64(c.Rank())); err != nil { // rank 0's will be used
		return err
	}
	images, labels, test, err := load()
	if err != nil {
		return err
	}
	data, err := gomlx.NewDataset(c, "digits", []*tensors.Tensor{images}, []*tensors.Tensor{labels}, 16, distributed.SamplerConfig{Seed: 1})
	if err != nil {
		return err
	}
	optimizer, err := gomlx.New(ctx, c, optimizers.Adam().Done(), cfg)
	if err != nil {
		return err
	}
	defer optimizer.Close()
	trainer := train.NewTrainer(backend, variables, model, losses.SparseCategoricalCrossEntropyLogits, optimizer, nil, nil)
	if accumulate > 1 {
		if err := trainer.AccumulateGradients(accumulate); err != nil {
			return err
		}
	}
	loop := train.NewLoop(trainer)
	optimizer.Attach(loop)
	if _, err := loop.RunEpochs(data, epochs); err != nil {
		return err
	}
	if c.Rank() == 0 {
		accuracy, err := evaluate(backend, variables, test)
		if err != nil {
			return err
		}
		fmt.Printf("%d ranks, %d epochs: %.1f %% of the test images read; checksum of the parameters %08x\n",
			c.WorldSize(), epochs, 100*accuracy, checksum(variables))
	}
	return nil
}

// model is a perceptron with one hidden layer.
func model(ctx *mlctx.Context, _ any, inputs []*graph.Node) []*graph.Node {
	hidden := activations.Relu(layers.Dense(ctx.In("hidden"), inputs[0], true, 32))
	return []*graph.Node{layers.Dense(ctx.In("logits"), hidden, true, digits.Classes)}
}

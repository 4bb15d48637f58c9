package distributed_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Four ranks average a gradient that lies in a slice of each.
func ExampleAllReduce() {
	err := local.Run(context.Background(), 4, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		values := []float32{1, 2, float32(c.Rank())}
		gradient, err := cpu.Wrap(rt, values)
		if err != nil {
			return err
		}
		defer gradient.Free()
		if err := distributed.AllReduce(ctx, c, gradient, comm.Avg); err != nil {
			return err
		}
		if c.Rank() == 0 {
			fmt.Println(values)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [1 2 1.5]
}

// Six ranks are a grid: three replicas of a model, each in two parts.
func ExampleMesh() {
	err := local.Run(context.Background(), 6, func(ctx context.Context, c comm.Communicator) error {
		mesh, err := distributed.NewMesh(ctx, c, distributed.Dim{Name: "data", Size: -1}, distributed.Dim{Name: "tensor", Size: 2})
		if err != nil {
			return err
		}
		defer mesh.Close()
		replicas, err := mesh.Comm("data") // the ranks that have the same part
		if err != nil {
			return err
		}
		rt := cpu.New()
		defer rt.Close()
		ranks := []int32{int32(c.Rank())}
		sum, err := cpu.Wrap(rt, ranks)
		if err != nil {
			return err
		}
		defer sum.Free()
		if err := distributed.AllReduce(ctx, replicas, sum, comm.Sum); err != nil {
			return err
		}
		if c.Rank() == 5 {
			part, err := mesh.Coord("tensor")
			if err != nil {
				return err
			}
			fmt.Println(mesh.Dims(), "part", part, "of rank", replicas.Rank(), "of", replicas.WorldSize(), "replicas:", ranks)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [{data 3} {tensor 2}] part 1 of rank 2 of 3 replicas: [9]
}

// Two ranks share five samples, one of them twice: each epoch has another order.
func ExampleSampler() {
	err := local.Run(context.Background(), 2, func(_ context.Context, c comm.Communicator) error {
		sampler, err := distributed.NewSampler(c, 5, distributed.SamplerConfig{Seed: 1})
		if err != nil {
			return err
		}
		for epoch := range 2 {
			for _, batch := range sampler.Batches(epoch, 2) {
				if c.Rank() == 0 {
					fmt.Println("epoch", epoch, "has a batch of", len(batch))
				}
			}
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// epoch 0 has a batch of 2
	// epoch 0 has a batch of 1
	// epoch 1 has a batch of 2
	// epoch 1 has a batch of 1
}

// The loss of a rank counts with the number of samples that it is of. A
// configuration comes from rank 0.
func ExampleAverageMetrics() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		samples, loss := []float64{30, 10}[c.Rank()], []float64{1, 2}[c.Rank()]
		averages, err := distributed.AverageMetrics(ctx, rt, c, samples, loss)
		if err != nil {
			return err
		}
		var config []byte
		if c.Rank() == 0 {
			config = []byte("hidden: 32")
		}
		config, err = distributed.BroadcastBytes(ctx, rt, c, config, 0)
		if err != nil {
			return err
		}
		if c.Rank() == 1 {
			fmt.Printf("%s, loss: %v\n", config, averages[0])
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: hidden: 32, loss: 1.25
}

// SyncBatchNorm: the mean and the variance of a layer's inputs are those of the samples of all
// ranks. A rank adds up its own, and the sums and their number are one group.
func ExampleAllReduceAll() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		inputs := [][]float32{{1, 2, 3}, {6}}[c.Rank()] // of one channel
		sums, count := make([]float32, 2), []int32{int32(len(inputs))}
		for _, x := range inputs {
			sums[0] += x
			sums[1] += x * x
		}
		moments, err := cpu.Wrap(rt, sums)
		if err != nil {
			return err
		}
		defer moments.Free()
		samples, err := cpu.Wrap(rt, count)
		if err != nil {
			return err
		}
		defer samples.Free()
		if err := distributed.AllReduceAll(ctx, c, []*runtime.Tensor{moments, samples}, comm.Sum); err != nil {
			return err
		}
		mean := sums[0] / float32(count[0])
		if variance := sums[1]/float32(count[0]) - mean*mean; c.Rank() == 1 {
			fmt.Println("mean", mean, "variance", variance)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: mean 3 variance 3.5
}

// A run that stopped in the middle of an epoch goes on with the batch after the last one: the
// order follows from the seed and the epoch, so a checkpoint has two numbers.
func ExampleSampler_position() {
	err := local.Run(context.Background(), 2, func(_ context.Context, c comm.Communicator) error {
		sampler, err := distributed.NewSampler(c, 12, distributed.SamplerConfig{Seed: 1, InOrder: true})
		if err != nil {
			return err
		}
		epoch, batch := 3, 1 // from the checkpoint
		for ; epoch < 5; epoch, batch = epoch+1, 0 {
			for _, samples := range sampler.Batches(epoch, 2)[batch:] {
				if batch++; c.Rank() == 0 { // a step; then epoch and batch are the position
					fmt.Println("epoch", epoch, "batch", batch, "samples", samples)
				}
			}
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// epoch 3 batch 2 samples [4 6]
	// epoch 3 batch 3 samples [8 10]
	// epoch 4 batch 1 samples [0 2]
	// epoch 4 batch 2 samples [4 6]
	// epoch 4 batch 3 samples [8 10]
}

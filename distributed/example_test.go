package distributed_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
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

// A quarter of the entries is sent in each step. The rest waits in the residual,
// so that it is in the average of a later one.
func ExampleSparse() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		const n = 4
		s, err := distributed.NewSparse(rt, c, n, distributed.Config{Pattern: distributed.Oktopk, Density: 0.01})
		if err != nil {
			return err
		}
		defer s.Close()
		for _, values := range [][]float32{{9, 1, 5, 2}, {0, 1, 0, 2}, {0, 0, 0, 0}} {
			gradient, err := cpu.Wrap(rt, values)
			if err != nil {
				return err
			}
			defer gradient.Free()
			err = s.AllReduce(ctx, gradient) // in its place: the average over the ranks
			if err != nil {
				return err
			}
			if c.Rank() == 0 {
				fmt.Println(values)
			}
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// [9 0 0 0]
	// [0 0 5 0]
	// [0 0 0 4]
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
			fmt.Println(mesh.Dims(), "rank", replicas.Rank(), "of", replicas.WorldSize(), "replicas:", ranks)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [{data 3} {tensor 2}] rank 2 of 3 replicas: [9]
}

// Two ranks train a model of two layers. The second rank does not use the first
// layer in this step.
func ExampleGradientSync() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		var layers []*runtime.Tensor // the parameters, in the order of the forward pass
		for range 2 {
			parameters, err := cpu.Wrap(rt, make([]float32, 3))
			if err != nil {
				return err
			}
			defer parameters.Free()
			layers = append(layers, parameters)
		}
		sync, err := distributed.NewGradientSync(ctx, rt, c, layers, distributed.GradientConfig{})
		if err != nil {
			return err
		}
		defer sync.Close()

		for i := len(layers) - 1; i >= c.Rank(); i-- { // a backward pass
			gradient, err := cpu.Wrap(rt, []float32{1, float32(i), float32(c.Rank())})
			if err != nil {
				return err
			}
			defer gradient.Free()
			if err := sync.Ready(ctx, i, gradient); err != nil {
				return err
			}
		}
		if err := sync.Wait(ctx); err != nil {
			return err
		}
		for i := range layers {
			average, err := cpu.Slice[float32](sync.Result(i))
			if err != nil {
				return err
			}
			if c.Rank() == 1 {
				fmt.Println("layer", i, average)
			}
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// layer 0 [0.5 0 0]
	// layer 1 [1 1 0.5]
}

// The gradients of two ranks live in the buckets, and nothing is copied.
func ExampleGradientSync_Gradients() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		layer, err := cpu.Wrap(rt, make([]float32, 3))
		if err != nil {
			return err
		}
		defer layer.Free()
		sync, err := distributed.NewGradientSync(ctx, rt, c, []*runtime.Tensor{layer, layer}, distributed.GradientConfig{BucketViews: true})
		if err != nil {
			return err
		}
		defer sync.Close()
		gradients := sync.Gradients()
		for i, gradient := range gradients { // a backward pass
			values, err := cpu.Slice[float32](gradient)
			if err != nil {
				return err
			}
			values[0], values[2] = float32(i+1), float32(c.Rank())
		}
		if err := sync.ReduceAll(ctx, gradients); err != nil {
			return err
		}
		for i, gradient := range gradients {
			values, err := cpu.Slice[float32](gradient)
			if err != nil {
				return err
			}
			if c.Rank() == 1 {
				fmt.Println("layer", i, values)
			}
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// layer 0 [1 0 0.5]
	// layer 1 [2 0 0.5]
}

func ExampleLevels() {
	err := local.Run(context.Background(), 4, func(ctx context.Context, c comm.Communicator) error {
		mesh, err := distributed.NewMesh(ctx, c, distributed.Dim{Name: "host", Size: 2}, distributed.Dim{Name: "gpu", Size: -1})
		if err != nil {
			return err
		}
		defer mesh.Close()
		rt := cpu.New()
		defer rt.Close()
		const n = 400
		l, err := distributed.NewLevels(rt, mesh, n, distributed.Config{Pattern: "oktopk", Density: 0.01})
		if err != nil {
			return err
		}
		defer l.Close()
		values := make([]float32, n)
		values[7], values[300] = float32(c.Rank()), 4 // of the first and of the second rank of a host
		gradient, err := cpu.Wrap(rt, values)
		if err != nil {
			return err
		}
		defer gradient.Free()
		err = l.AllReduce(ctx, gradient)
		if err != nil {
			return err
		}
		if c.Rank() == 0 {
			fmt.Println(values[7], values[300])
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: 1.5 4
}

// Two ranks share five samples: each epoch has another order.
func ExampleSampler() {
	err := local.Run(context.Background(), 2, func(_ context.Context, c comm.Communicator) error {
		sampler, err := distributed.NewSampler(c, 5, distributed.SamplerConfig{Seed: 1, Tail: distributed.TailDrop})
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
	// epoch 1 has a batch of 2
}

// Four backward passes, of which the last one communicates.
func ExampleGradientSync_Accumulate() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		values := []float32{0}
		gradient, err := cpu.Wrap(rt, values)
		if err != nil {
			return err
		}
		defer gradient.Free()
		sync, err := distributed.NewGradientSync(ctx, rt, c, []*runtime.Tensor{gradient}, distributed.GradientConfig{})
		if err != nil {
			return err
		}
		defer sync.Close()
		const passes = 4
		for pass := range passes {
			values[0] = float32(1+c.Rank()) / passes // a backward pass
			if pass < passes-1 {
				err = sync.Accumulate(0, gradient)
			} else {
				err = sync.Ready(ctx, 0, gradient)
			}
			if err != nil {
				return err
			}
		}
		if err := sync.Wait(ctx); err != nil {
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
	// Output: [1.5]
}

// The first rank has three batches, the second one. It makes the updates of the
// other two as well, so both end with the same parameter.
func ExampleGradientSync_Join() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		parameter, values := float32(0), []float32{0}
		gradient, err := cpu.Wrap(rt, values)
		if err != nil {
			return err
		}
		defer gradient.Free()
		all := []*runtime.Tensor{gradient}
		sync, err := distributed.NewGradientSync(ctx, rt, c, all, distributed.GradientConfig{Uneven: true})
		if err != nil {
			return err
		}
		defer sync.Close()
		update := func() error {
			average, err := cpu.Slice[float32](sync.Result(0))
			if err == nil {
				parameter -= average[0]
			}
			return err
		}

		for range []int{3, 1}[c.Rank()] {
			values[0] = 1 // a backward pass
			if err := sync.ReduceAll(ctx, all); err != nil {
				return err
			}
			if err := update(); err != nil {
				return err
			}
		}
		if err := sync.Join(ctx, update); err != nil {
			return err
		}
		if c.Rank() == 1 {
			fmt.Println(parameter)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: -2
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

// A loss scale that follows overflows: gradients of type F16 are computed from a loss
// that is multiplied by it. A step in which a gradient of any rank is not finite is
// dropped on all of them.
func ExampleGradientSync_lossScale() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		layer, err := runtime.New(rt, dtype.F16, 100, 100)
		if err != nil {
			return err
		}
		defer layer.Free()
		gradients := []*runtime.Tensor{layer}
		sync, err := distributed.NewGradientSync(ctx, rt, c, gradients, distributed.GradientConfig{
			Config: distributed.Config{Pattern: distributed.TopkA, Density: 0.1},
		})
		if err != nil {
			return err
		}
		defer sync.Close()
		scale := 65536.0
		for step := range 4 {
			if err := layer.Fill(3 * scale); err != nil { // the backward pass
				return err
			}
			if err := sync.ReduceAll(ctx, gradients); err != nil {
				return err
			}
			stats, err := sync.Stats(ctx)
			if err != nil {
				return err
			}
			if c.Rank() == 0 {
				fmt.Printf("step %d, scale %v, skipped: %v\n", step, scale, stats.Skipped)
			}
			if stats.Skipped { // no update of the parameters
				scale /= 2
				if err := sync.ScaleResidual(0.5); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// step 0, scale 65536, skipped: true
	// step 1, scale 32768, skipped: true
	// step 2, scale 16384, skipped: false
	// step 3, scale 16384, skipped: false
}

func ExampleSparse_inPlace() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		const n, learningRate = 4, 0.5
		sums, weights := make([]float32, n), make([]float32, n)
		gradient, err := cpu.Wrap(rt, sums)
		if err != nil {
			return err
		}
		defer gradient.Free()
		parameters, err := cpu.Wrap(rt, weights)
		if err != nil {
			return err
		}
		defer parameters.Free()
		s, err := distributed.NewSparse(rt, c, n, distributed.Config{Pattern: distributed.Oktopk, Density: 0.01, NoUndo: true, InPlace: true})
		if err != nil {
			return err
		}
		defer s.Close()
		for range 2 {
			for i, g := range []float32{4, 0, 2, 3} {
				sums[i] += g // the backward pass adds to gradient, which is never set to zero
			}
			err = s.AllReduce(ctx, gradient) // takes out what is sent
			if err != nil {
				return err
			}
			err = s.AddResult(parameters, -learningRate) // or s.Entries(), indices and values
			if err != nil {
				return err
			}
		}
		if c.Rank() == 0 {
			fmt.Println(sums, weights)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [4 0 4 0] [-2 0 0 -3]
}

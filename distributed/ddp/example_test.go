package ddp_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Two ranks train a model of two layers. The second rank does not use the first
// layer in this step.
func ExampleGradients() {
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
		sync, err := ddp.New(ctx, rt, c, layers, ddp.Config{})
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
func ExampleGradients_Views() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		layers := make([]*runtime.Tensor, 2)
		for i := range layers {
			layer, err := runtime.New(rt, dtype.F32, 3)
			if err != nil {
				return err
			}
			defer layer.Free()
			layers[i] = layer
		}
		sync, err := ddp.New(ctx, rt, c, layers, ddp.Config{BucketViews: true})
		if err != nil {
			return err
		}
		defer sync.Close()
		gradients := sync.Views()
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

// Four backward passes, of which the last one communicates.
func ExampleGradients_Accumulate() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		values := []float32{0}
		gradient, err := cpu.Wrap(rt, values)
		if err != nil {
			return err
		}
		defer gradient.Free()
		sync, err := ddp.New(ctx, rt, c, []*runtime.Tensor{gradient}, ddp.Config{})
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
func ExampleGradients_Join() {
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
		sync, err := ddp.New(ctx, rt, c, all, ddp.Config{Uneven: true})
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
		if err := sync.Join(ctx, all, update); err != nil {
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

// A loss scale that adapts to non-finite gradients: gradients of type F16 are computed from a loss that is multiplied
// by it. A step in which a gradient of any rank is not finite is dropped on all of them.
func ExampleGradients_lossScale() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		layer, err := runtime.New(rt, dtype.F16, 100, 100)
		if err != nil {
			return err
		}
		defer layer.Free()
		gradients := []*runtime.Tensor{layer}
		sync, err := ddp.New(ctx, rt, c, gradients, ddp.Config{
			Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1},
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

// Metrics of a training: what each step sent, and how much of its exchanges the backward pass hid.
func ExampleGradients_OnStep() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		layer, err := runtime.New(rt, dtype.F32, 1000)
		if err != nil {
			return err
		}
		defer layer.Free()
		sync, err := ddp.New(ctx, rt, c, []*runtime.Tensor{layer}, ddp.Config{
			Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}, DenseUpTo: -1, Uneven: true,
		})
		if err != nil {
			return err
		}
		defer sync.Close()
		if c.Rank() == 0 {
			sync.OnStep(func(s ddp.Stats) {
				fmt.Printf("step %d: %d bytes, exchange timed: %v\n", s.Step, s.SentBytes, s.ExchangeTime > 0)
			})
			if err := layer.Fill(1); err != nil {
				return err
			}
			canceled, cancel := context.WithCancel(ctx)
			cancel()
			if err := sync.ReduceAll(canceled, []*runtime.Tensor{layer}); err == nil { // rolled back: no step
				return errors.New("want an error")
			}
			return errors.Join(sync.ReduceAll(ctx, []*runtime.Tensor{layer}), sync.Join(ctx, nil, nil))
		}
		return sync.Join(ctx, nil, nil)
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: step 0: 816 bytes, exchange timed: true
}

// Ranks with different numbers of samples, and of backward passes, for one update: the result is the mean over the samples of all ranks.
func ExampleGradients_Weigh() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		values := []float32{0}
		gradient, err := cpu.Wrap(rt, values)
		if err != nil {
			return err
		}
		defer gradient.Free()
		sync, err := ddp.New(ctx, rt, c, []*runtime.Tensor{gradient}, ddp.Config{Weighted: true})
		if err != nil {
			return err
		}
		defer sync.Close()
		passes := [][][]float32{{{1, 2, 3}, {4, 5}}, {{9}}}[c.Rank()] // the gradient of each sample
		for pass, batch := range passes {
			if err := sync.Weigh(float64(len(batch))); err != nil {
				return err
			}
			values[0] = 0
			for _, g := range batch { // a backward pass, of the mean loss over the batch
				values[0] += g / float32(len(batch))
			}
			if pass < len(passes)-1 {
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
		stats, err := sync.Stats(ctx)
		if err != nil {
			return err
		}
		fmt.Println("the mean of", stats.Weight, "samples:", values[0])
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// the mean of 6 samples: 4
	// the mean of 6 samples: 4
}

// A checkpoint has the parameters and the optimizer's state, which are the same on all ranks, and
// the state of the exchange, of which each rank has a part. The resumed run ends where the
// straight one does.
func ExampleGradients_State() {
	type checkpoint struct {
		Parameter, Velocity float32
		Exchange            []byte
	}
	run := func(ctx context.Context, c comm.Communicator, from checkpoint, steps int) (checkpoint, error) {
		rt := cpu.New()
		defer rt.Close()
		values := make([]float32, 4)
		gradient, err := cpu.Wrap(rt, values, 2, 2)
		if err != nil {
			return from, err
		}
		defer gradient.Free()
		all := []*runtime.Tensor{gradient}
		sync, err := ddp.New(ctx, rt, c, all, ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.25}})
		if err != nil {
			return from, err
		}
		defer sync.Close()
		if from.Exchange != nil {
			if err := sync.Restore(ctx, from.Exchange); err != nil {
				return from, err
			}
		}
		for range steps {
			for i := range values { // a backward pass
				values[i] = float32((i + 1) * (c.Rank() + 1))
			}
			if err := sync.ReduceAll(ctx, all); err != nil {
				return from, err
			}
			from.Velocity = 0.5*from.Velocity + values[2]
			from.Parameter -= 0.5 * from.Velocity
		}
		from.Exchange, err = sync.State(ctx)
		return from, err
	}
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		straight, err := run(ctx, c, checkpoint{}, 4)
		if err != nil {
			return err
		}
		saved, err := run(ctx, c, checkpoint{}, 1)
		if err != nil {
			return err
		}
		resumed, err := run(ctx, c, saved, 3)
		if err != nil {
			return err
		}
		if c.Rank() == 0 {
			fmt.Println(straight.Parameter, straight.Velocity)
			fmt.Println(resumed.Parameter, resumed.Velocity)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// -7.875 2.25
	// -7.875 2.25
}

// Two hosts of two ranks: dense within a host, and sparse between them.
func ExampleGradients_mesh() {
	hosts := func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
		return distributed.NewMesh(ctx, c, distributed.Dim{Name: "host", Size: 2}, distributed.Dim{Name: "gpu", Size: -1})
	}
	err := local.Run(context.Background(), 4, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		const n = 400
		values := make([]float32, n)
		values[7] = float32(c.Rank()) // in the share of the first rank of a host
		values[300] = 4               // of the second
		gradient, err := cpu.Wrap(rt, values)
		if err != nil {
			return err
		}
		defer gradient.Free()
		gradients := []*runtime.Tensor{gradient}
		sync, err := ddp.New(ctx, rt, c, gradients, ddp.Config{
			Config:    sparse.Config{Pattern: sparse.Oktopk, Density: 0.01},
			DenseUpTo: -1,
			Mesh:      hosts,
		})
		if err != nil {
			return err
		}
		defer sync.Close()
		if err := sync.ReduceAll(ctx, gradients); err != nil {
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

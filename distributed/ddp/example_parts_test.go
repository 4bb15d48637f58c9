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
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// onTwoRanks runs the body of an example.
func onTwoRanks(body func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error) {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		return body(ctx, rt, c)
	})
	if err != nil {
		fmt.Println(err)
	}
}

// An error that concerns one parameter or gradient has its number, for programs whose parameters have names.
func ExampleNew_error() {
	onTwoRanks(func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error {
		names := []string{"weights", "bias"}
		var parameters []*runtime.Tensor
		for range names {
			t, err := runtime.FromSlice(rt, []float32{1, 2})
			if err != nil {
				return err
			}
			defer t.Free()
			parameters = append(parameters, t)
		}
		if err := parameters[1].Free(); err != nil {
			return err
		}
		_, err := ddp.New(ctx, rt, c, parameters, ddp.Config{})
		var t *distributed.TensorError
		if errors.As(err, &t) && c.Rank() == 0 {
			fmt.Println(names[t.Index], "is freed:", errors.Is(t.Unwrap(), runtime.ErrFreed))
		}
		return nil
	})
	// Output: bias is freed: true
}

// Ranks agree by their own vote that a step counts. A step that one of them refuses is rolled back on this rank,
// and its residuals are as before. The gradients then go on over another communicator.
func ExampleGradients_BeforeCommit() {
	onTwoRanks(func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error {
		values := []float32{4, 1, 0, 0}
		parameters, err := cpu.Wrap(rt, values, 2, 2)
		if err != nil {
			return err
		}
		defer parameters.Free()
		config := ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.25}}
		sync, err := ddp.New(ctx, rt, c, []*runtime.Tensor{parameters}, config)
		if err != nil {
			return err
		}
		defer sync.Close()
		errRefused := errors.New("refused")
		sync.BeforeCommit(func(context.Context) error { return errRefused })
		err = sync.ReduceAll(ctx, []*runtime.Tensor{parameters})
		if c.Rank() == 0 {
			fmt.Println(errors.Is(err, errRefused), values)
		}

		again, err := c.Split(ctx, 0, c.Rank())
		if err != nil {
			return err
		}
		defer again.Close()
		if err := sync.Rebind(ctx, again); err != nil {
			return err
		}
		sync.BeforeCommit(nil)
		if err := sync.ReduceAll(ctx, []*runtime.Tensor{parameters}); err != nil {
			return err
		}
		residuals, err := sync.Residuals()
		if err != nil {
			return err
		}
		kept, err := runtime.ToSlice[float32](residuals[0])
		if err != nil {
			return err
		}
		if c.Rank() == 0 {
			fmt.Println(values, "sent,", kept, "kept")
		}
		return nil
	})
	// Output:
	// true [4 1 0 0]
	// [4 0 0 0] sent, [0 1 0 0] kept
}

// With sharded optimizer state a rank updates its part of the parameters alone. Gradients are clipped by their norm
// over all ranks.
func ExampleShards_Norm() {
	onTwoRanks(func(ctx context.Context, rt *cpu.Runtime, c comm.Communicator) error {
		gradient, err := runtime.FromSlice(rt, []float32{3, 0, 0, 4})
		if err != nil {
			return err
		}
		defer gradient.Free()
		sync, err := ddp.New(ctx, rt, c, []*runtime.Tensor{gradient}, ddp.Config{Shard: true})
		if err != nil {
			return err
		}
		defer sync.Close()
		if err := sync.ReduceAll(ctx, []*runtime.Tensor{gradient}); err != nil {
			return err
		}
		shards, err := sync.Shards()
		if err != nil {
			return err
		}
		norm, err := shards.Norm(ctx)
		if err != nil {
			return err
		}
		if c.Rank() == 1 {
			shard := shards.Buckets[0]
			values, err := runtime.ToSlice[float32](shard.Tensor)
			fmt.Println("norm", norm, "and here", values, err)
			fmt.Println("of parameter", shard.Parts[0].Param)
		}
		return nil
	})
	// Output:
	// norm 5 and here [0 4] <nil>
	// of parameter 0
}

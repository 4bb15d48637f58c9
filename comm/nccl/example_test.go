package nccl_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// A goroutine per GPU: each averages its gradient with the others'. It needs
// GPUs, so it is not run here.
func ExampleInProcess() {
	ctx := context.Background()
	gpus, err := cuda.Count()
	if err != nil {
		fmt.Println(err)
		return
	}
	runtimes := make([]*cuda.Runtime, gpus)
	for i := range runtimes {
		if runtimes[i], err = cuda.Open(i); err != nil {
			fmt.Println(err)
			return
		}
		defer runtimes[i].Close() //nolint:errcheck
	}
	world, err := nccl.InProcess(ctx, runtimes)
	if err != nil {
		fmt.Println(err)
		return
	}
	ranks := make([]comm.Communicator, len(world))
	for i, c := range world {
		ranks[i] = c
	}
	err = comm.Run(ctx, ranks, func(ctx context.Context, c comm.Communicator) error {
		gradient, err := runtime.FromSlice(runtimes[c.Rank()], []float32{1, 2, 3})
		if err != nil {
			return err
		}
		defer gradient.Free() //nolint:errcheck
		return distributed.AllReduce(ctx, c, gradient, comm.Avg)
	})
	fmt.Println(err)
}

// Command allreduce is the smallest tutti program: four ranks, which are
// goroutines of this process, average their gradients.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func main() {
	err := local.Run(context.Background(), 4, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		gradient := []float32{1, 2, float32(c.Rank())}
		tensor, err := cpu.Wrap(rt, gradient) // of the slice itself: nothing is copied
		if err != nil {
			return err
		}
		defer tensor.Free()
		if err := distributed.AllReduce(ctx, c, tensor, comm.Avg); err != nil {
			return err
		}
		fmt.Println("rank", c.Rank(), "has", gradient) // [1 2 1.5], the same bits on every rank
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}

// Command allreduce is the smallest tutti program: ranks average their gradients.
//
//	go run ./examples/allreduce                    # four ranks, goroutines of one process
//	tutti launch -n 3 go run ./examples/allreduce  # three ranks, processes
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func main() {
	err := tutti.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		gradient := []float32{1, 2, float32(r.Comm.Rank())}
		tensor, err := cpu.Wrap(r.Runtime, gradient) // shares the slice's memory
		if err != nil {
			return err
		}
		defer tensor.Free()
		if err := distributed.AllReduce(ctx, r.Comm, tensor, comm.Avg); err != nil {
			return err
		}
		fmt.Println("rank", r.Comm.Rank(), "has", gradient) // the same bits on every rank
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}

// Command allreduce is the smallest tutti program: four ranks, which are
// goroutines of this process, add up their tensors.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func main() {
	rt := cpu.New() // owns the tensors' memory, outside the Go heap
	results := make([][]float32, 4)
	err := local.Run(context.Background(), len(results), func(ctx context.Context, c comm.Communicator) error {
		rank := float32(c.Rank())
		t, err := runtime.FromSlice(rt, []float32{rank, 10 * rank, 1}, 3)
		if err != nil {
			return err
		}
		defer t.Free()
		if err := distributed.AllReduce(ctx, c, t, comm.Sum); err != nil {
			return err
		}
		results[c.Rank()], err = runtime.ToSlice[float32](t)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	for rank, sum := range results {
		fmt.Printf("rank %d put in [%d %d 1] and got the sum of all ranks: %v\n", rank, rank, 10*rank, sum)
	}
	if err := rt.Close(); err != nil {
		log.Fatal(err)
	}
}

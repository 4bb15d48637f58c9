package tutti_test

import (
	"context"
	"fmt"
	"log"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
)

// Four goroutines average their gradients; started by tutti launch, torchrun, srun or mpirun, as many processes.
func Example() {
	err := tutti.Run(context.Background(), func(ctx context.Context, r tutti.Rank) error {
		gradient, err := runtime.FromSlice(r.Runtime, []float32{1, 2, float32(r.Comm.Rank())})
		if err != nil {
			return err
		}
		defer gradient.Free()
		if err := distributed.AllReduce(ctx, r.Comm, gradient, comm.Avg); err != nil {
			return err
		}
		average, err := runtime.ToSlice[float32](gradient)
		if err == nil && r.Comm.Rank() == 0 {
			fmt.Println(average)
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: [1 2 1.5]
}

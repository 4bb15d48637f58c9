// Command random-k reduces gradients by a compression of its own: two ranks minimize the distance of
// a vector to the mean of two others, and send a tenth of it in each step.
//
//	go run ./examples/random-k
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	return local.Run(ctx, 2, func(ctx context.Context, c comm.Communicator) (err error) {
		rt := cpu.New()
		defer func() { err = errors.Join(err, rt.Close()) }()
		const n, steps = 1000, 1500
		x, values := make([]float32, n), make([]float32, n)
		gradient, err := cpu.Wrap(rt, values)
		if err != nil {
			return err
		}
		defer gradient.Free()
		all := []*runtime.Tensor{gradient}
		sync, err := ddp.New(ctx, rt, c, all, ddp.Config{Reducer: newRandomK})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, sync.Close()) }()
		for range steps {
			for i := range values { // of half the squared distance to this rank's vector
				values[i] = x[i] - float32(c.Rank()*i)
			}
			if err := sync.ReduceAll(ctx, all); err != nil {
				return err
			}
			for i := range x {
				x[i] -= 0.02 * values[i]
			}
		}
		far := 0.0
		for i := range x {
			far = max(far, math.Abs(float64(x[i])-float64(i)/2))
		}
		if c.Rank() == 0 {
			fmt.Printf("after %d steps no element is farther than %.3f from the mean of the ranks' vectors\n", steps, far)
		}
		return nil
	})
}

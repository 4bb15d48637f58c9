// Command powersgd reduces gradients by PowerSGD: two ranks minimize the distance of a matrix to the
// mean of two others, and send factors of rank 4 in each step.
//
//	go run ./examples/powersgd
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"math/rand/v2"

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
		const rows, columns, steps = 40, 30, 300
		rng := rand.New(rand.NewPCG(7, 7))
		goals := [2][]float32{make([]float32, rows*columns), make([]float32, rows*columns)}
		for i := range rows * columns {
			goals[0][i], goals[1][i] = float32(rng.NormFloat64()), float32(rng.NormFloat64())
		}
		x, values := make([]float32, rows*columns), make([]float32, rows*columns)
		gradient, err := cpu.Wrap(rt, values, rows, columns)
		if err != nil {
			return err
		}
		defer gradient.Free()
		all := []*runtime.Tensor{gradient}
		sync, err := ddp.New(ctx, rt, c, all, ddp.Config{Reducer: newPowerSGD})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, sync.Close()) }()
		for range steps {
			for i := range values { // of half the squared distance to this rank's matrix
				values[i] = x[i] - goals[c.Rank()][i]
			}
			if err := sync.ReduceAll(ctx, all); err != nil {
				return err
			}
			for i := range x {
				x[i] -= 0.05 * values[i]
			}
		}
		far := 0.0
		for i := range x {
			far = max(far, math.Abs(float64(x[i]-(goals[0][i]+goals[1][i])/2)))
		}
		if c.Rank() == 0 {
			fmt.Printf("after %d steps no element is farther than %.3f from the mean of the ranks' matrices\n", steps, far)
		}
		return nil
	})
}

package sparse_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A quarter of the entries is sent in each step. The rest waits in the residual,
// so that it is in the average of a later one.
func ExampleReducer() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		const n = 4
		s, err := sparse.New(rt, c, n, sparse.Config{Pattern: sparse.Oktopk, Density: 0.01})
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

func ExampleReducer_AddResult() {
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		const n, learningRate = 4, 0.5
		weights := make([]float32, n)
		parameters, err := cpu.Wrap(rt, weights)
		if err != nil {
			return err
		}
		defer parameters.Free()
		s, err := sparse.New(rt, c, n, sparse.Config{Pattern: sparse.TopkA, Density: 0.01})
		if err != nil {
			return err
		}
		defer s.Close()
		for range 2 {
			gradient, err := cpu.Wrap(rt, []float32{4, 0, 2, 3})
			if err != nil {
				return err
			}
			err = s.AllReduce(ctx, gradient)
			if err != nil {
				return err
			}
			err = s.AddResult(parameters, -learningRate) // or s.Entries(), indices and values
			if err != nil {
				return err
			}
			err = gradient.Free()
			if err != nil {
				return err
			}
		}
		if c.Rank() == 0 {
			fmt.Println(weights)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [-2 0 0 -3]
}

package local_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Three ranks add up their numbers.
func ExampleRun() {
	err := local.Run(context.Background(), 3, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		t, err := runtime.FromSlice(rt, []float32{1, float32(c.Rank())}, 2)
		if err != nil {
			return err
		}
		defer t.Free()
		p, err := t.Ptr()
		if err != nil {
			return err
		}
		if err := c.AllReduce(p, p, t.Len(), dtype.F32, comm.Sum); err != nil {
			return err
		}
		if err := c.Sync(ctx); err != nil {
			return err
		}
		sum, err := runtime.ToSlice[float32](t)
		if c.Rank() == 0 {
			fmt.Println(sum)
		}
		return err
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: [3 3]
}

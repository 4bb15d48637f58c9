package checked_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Ranks that call different things are told so, instead of waiting forever.
func ExampleNew() {
	rt := cpu.New()
	defer rt.Close()
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		k, err := checked.New(ctx, c, rt, 0)
		if err != nil {
			return err
		}
		defer k.Close()
		err = k.AllReduce(0, 0, 0, []dtype.DType{dtype.F32, dtype.BF16}[c.Rank()], comm.Sum)
		if c.Rank() == 0 {
			fmt.Println(err)
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: checked: allreduce on rank 0: collective #1: ranks disagree: rank 0 called allreduce of 0 f32, sum; rank 1 called allreduce of 0 bf16, sum
}

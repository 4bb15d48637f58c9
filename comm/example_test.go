package comm_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Two ranks exchange a vector. Each sends and receives, so the calls belong in a group.
func ExampleCommunicator_group() {
	rt := cpu.New()
	defer rt.Close()
	err := local.Run(context.Background(), 2, func(ctx context.Context, c comm.Communicator) error {
		send, err := rt.Allocate(4)
		if err != nil {
			return err
		}
		defer rt.Deallocate(send)
		recv, err := rt.Allocate(4)
		if err != nil {
			return err
		}
		defer rt.Deallocate(recv)
		if err := rt.Fill(send, 1, dtype.F32, float64(c.Rank())); err != nil {
			return err
		}
		peer := 1 - c.Rank()
		err = c.Group(
			comm.SendCall(send, 1, dtype.F32, peer, 0),
			comm.RecvCall(recv, 1, dtype.F32, peer, 0))
		if err != nil {
			return err
		}
		return c.Sync(ctx)
	})
	fmt.Println(err)
	// Output: <nil>
}

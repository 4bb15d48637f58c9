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

// A Meter tells what a program sends.
func ExampleMeter() {
	rt := cpu.New()
	defer rt.Close()
	err := local.Run(context.Background(), 4, func(ctx context.Context, c comm.Communicator) error {
		buf, err := rt.Allocate(4000)
		if err != nil {
			return err
		}
		defer rt.Deallocate(buf)
		m := comm.NewMeter(c)
		if err := m.AllReduce(buf, buf, 1000, dtype.F32, comm.Max); err != nil {
			return err
		}
		if err := m.Sync(ctx); err != nil {
			return err
		}
		if m.Rank() == 0 {
			t := m.Totals()
			fmt.Println(t.SentElements, "elements,", t.SentBytes, "bytes")
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: 1500 elements, 6000 bytes
}

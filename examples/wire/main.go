// Command wire makes a communicator of network connections: its ranks share nothing but
// the bytes that go over them. The backend is in wire.go, and wire_test.go runs the
// conformance suite on it.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func main() {
	comms, err := world(4, loopback)
	if err != nil {
		log.Fatal(err)
	}
	if err := comm.Run(context.Background(), comms, average); err != nil {
		log.Fatal(err)
	}
}

// average averages a vector over the ranks; the first one prints it.
func average(ctx context.Context, c comm.Communicator) error {
	rt := cpu.New()
	defer rt.Close()
	gradient := []float32{1, 2, float32(c.Rank())}
	tensor, err := cpu.Wrap(rt, gradient)
	if err != nil {
		return err
	}
	defer tensor.Free()
	if err := distributed.AllReduce(ctx, c, tensor, comm.Avg); err != nil {
		return err
	}
	if c.Rank() == 0 {
		fmt.Println("the average of", c.WorldSize(), "ranks is", gradient) // [1 2 1.5]
	}
	return nil
}

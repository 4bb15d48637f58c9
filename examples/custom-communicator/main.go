// Command custom-communicator shows how to write a backend of one's own: a type
// that does what a rank calls (world.go), and a test (main_test.go) that runs the
// conformance suite on it.
//
// It is written to be read, not to be fast; comm/local is the fast one.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func main() {
	if err := run(context.Background(), 4); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run adds up one vector per rank.
func run(ctx context.Context, ranks int) error {
	rt := cpu.New()
	defer rt.Close()
	return comm.Run(ctx, newWorld(ranks, rt), func(ctx context.Context, c comm.Communicator) error { return add(ctx, rt, c) })
}

// add is what each rank does: it works on any communicator.
func add(ctx context.Context, rt runtime.Runtime, c comm.Communicator) error {
	r := float32(c.Rank())
	t, err := runtime.FromSlice(rt, []float32{1, r, r * r}, 3)
	if err != nil {
		return err
	}
	defer t.Free()
	buf, err := t.Ptr()
	if err != nil {
		return err
	}
	if err := c.AllReduce(buf, buf, t.Len(), t.DType(), comm.Sum); err != nil {
		return err
	}
	if err := c.Sync(ctx); err != nil {
		return err
	}
	sum, err := runtime.ToSlice[float32](t)
	if err != nil {
		return err
	}
	fmt.Printf("rank %d of %d: %v\n", c.Rank(), c.WorldSize(), sum)
	return nil
}

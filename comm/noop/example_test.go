package noop_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A program that is written for many ranks runs alone.
func ExampleNew() {
	rt := cpu.New()
	defer rt.Close()
	c := noop.New(rt)
	defer c.Close()
	t, err := runtime.FromSlice(rt, []float32{1, 2, 3})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer t.Free()
	if err := distributed.AllReduce(context.Background(), c, t, comm.Avg); err != nil {
		fmt.Println(err)
		return
	}
	average, err := runtime.ToSlice[float32](t)
	fmt.Println(average, err)
	// Output: [1 2 3] <nil>
}

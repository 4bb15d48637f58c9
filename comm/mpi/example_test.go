package mpi_test

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// The processes that mpirun started add up their ranks. It needs an MPI library,
// so it is not run here.
func ExampleInit() {
	ctx := context.Background()
	world, err := mpi.Init()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer mpi.Finalize(ctx)
	rt := cpu.New()
	defer rt.Close()
	const n = 1000
	send, err := rt.Allocate(n * dtype.F32.Size())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer rt.Deallocate(send)
	recv, err := rt.Allocate(n * dtype.F32.Size())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer rt.Deallocate(recv)
	if err := rt.Fill(send, n, dtype.F32, float64(world.Rank())); err != nil {
		fmt.Println(err)
		return
	}
	err = world.AllReduce(send, recv, n, dtype.F32, comm.Sum)
	if err != nil {
		fmt.Println(err)
		return
	}
	err = world.Sync(ctx)
	fmt.Println(err)
}

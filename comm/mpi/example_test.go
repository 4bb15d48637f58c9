package mpi_test

import (
	"context"
	"fmt"
	"log"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// The processes that mpirun started add up their ranks. It needs an MPI library,
// so it is not run here.
func ExampleRun() {
	err := mpi.Run(context.Background(), func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		sum := []float32{float32(c.Rank())}
		tensor, err := cpu.Wrap(rt, sum)
		if err != nil {
			return err
		}
		defer tensor.Free()
		if err := distributed.AllReduce(ctx, c, tensor, comm.Sum); err != nil {
			return err
		}
		fmt.Println("rank", c.Rank(), "has", sum)
		return nil
	})
	if err != nil {
		log.Fatal(err) // with this status the launcher ends the job
	}
}

// An MPI library is checked before the program uses it. A program that cannot go on ends the whole job. It needs an
// MPI library, so it is not run here.
func ExampleLibrary() {
	info, err := mpi.Library()
	if err != nil {
		log.Print(err) // names the files that were tried
		mpi.Abort(1)
	}
	fmt.Println(info.Library, info.ABI)
}

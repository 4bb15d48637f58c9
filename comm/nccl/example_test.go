package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// A goroutine per GPU: each averages its gradient with the others'. It needs
// GPUs, so it is not run here.
func ExampleRun() {
	err := nccl.Run(context.Background(), 0, func(ctx context.Context, c *nccl.Comm) error {
		gradient, err := runtime.FromSlice(c.Runtime(), []float32{1, 2, 3})
		if err != nil {
			return err
		}
		defer gradient.Free() //nolint:errcheck
		return distributed.AllReduce(ctx, c, gradient, comm.Avg)
	})
	fmt.Println(err)
}

// Connecting has a minute, and training takes as long as it takes. It needs GPUs, so it is not run here.
func ExampleNew() {
	train := func(context.Context, comm.Communicator) error { return nil }
	connecting, cancel := context.WithTimeout(context.Background(), time.Minute)
	world, err := nccl.New(connecting, 2)
	cancel()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer world[0].Runtime().Close() //nolint:errcheck
	defer world[1].Runtime().Close() //nolint:errcheck
	fmt.Println(comm.Run(context.Background(), []comm.Communicator{world[0], world[1]}, train))
}

// The same on runtimes that the program opens. It needs GPUs, so it is not run here.
func ExampleInProcess() {
	ctx := context.Background()
	gpus, err := cuda.Count()
	if err != nil {
		fmt.Println(err)
		return
	}
	runtimes := make([]*cuda.Runtime, gpus)
	for i := range runtimes {
		runtimes[i], err = cuda.Open(i) // its pool, its compute stream
		if err != nil {
			fmt.Println(err)
			return
		}
		defer runtimes[i].Close() //nolint:errcheck
	}
	world, err := nccl.InProcess(ctx, runtimes) // one rank per GPU, for goroutines of this process
	if err != nil {
		fmt.Println(err)
		return
	}
	ranks := make([]comm.Communicator, len(world))
	for i, c := range world {
		ranks[i] = c
	}
	err = comm.Run(ctx, ranks, func(ctx context.Context, c comm.Communicator) error {
		gradient, err := runtime.FromSlice(runtimes[c.Rank()], []float32{1, 2, 3})
		if err != nil {
			return err
		}
		defer gradient.Free() //nolint:errcheck
		return distributed.AllReduce(ctx, c, gradient, comm.Avg)
	})
	fmt.Println(err)
}

// A process of torchrun, mpirun or srun takes the GPU of its local rank. It needs
// GPUs, so it is not run here.
func ExampleFromEnv() {
	ctx := context.Background()
	env, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		fmt.Println(err)
		return
	}
	rt, err := cuda.Open(env.LocalRank)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer rt.Close()                //nolint:errcheck
	c, err := nccl.FromEnv(ctx, rt) // or: this process is a rank of torchrun, mpirun or srun
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(c.Rank(), c.WorldSize(), c.Close())
}

// The ranks of an MPI job, with a GPU each. It needs GPUs, so it is not run here.
func ExampleFrom() {
	ctx := context.Background()
	base, err := mpi.Init(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer mpi.Finalize(ctx)               //nolint:errcheck
	rt, err := cuda.Open(base.Rank() % 8) // eight GPUs in each host
	if err != nil {
		fmt.Println(err)
		return
	}
	defer rt.Close()                   //nolint:errcheck
	c, err := nccl.From(ctx, base, rt) // or: of the ranks of any communicator, such as MPI's
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(c.Rank(), c.WorldSize(), c.Close())
}

// Within a host there is NCCL, and between hosts an MPI library that does not reach
// GPUs: hostRanks are the ranks of this host, sameGPU those with this place on all
// hosts, both split from MPI's world. It needs GPUs, so it is not run here.
func ExampleFrom_hosts() {
	mesh := func(ctx context.Context, hostRanks, sameGPU comm.Communicator, rt *cuda.Runtime) (*distributed.Mesh, error) {
		within, err := nccl.From(ctx, hostRanks, rt) // NCCL, of the ranks of this host
		if err != nil {
			return nil, err
		}
		between, err := staged.New(sameGPU, rt, cpu.New()) // MPI, of the ranks with this place on all hosts
		if err != nil {
			return nil, errors.Join(err, within.Close())
		}
		return distributed.JoinMesh([]string{"host", "gpu"}, []comm.Communicator{between, within})
	}
	_ = mesh
}

// A framework computes on its stream: the communicator submits to that, so nothing has to wait. After a failure the
// survivors go on without the ranks that are lost. It needs GPUs, so it is not run here.
func ExampleComm_Shrink() {
	average := func(ctx context.Context, c *nccl.Comm, gradient *runtime.Tensor, stream uintptr) (*nccl.Comm, error) {
		if err := c.UseStream(stream); err != nil {
			return c, err
		}
		err := distributed.AllReduce(ctx, c, gradient, comm.Avg)
		var failed *nccl.Error
		if errors.As(err, &failed) {
			fmt.Println(failed.Call, failed.Status)
		}
		if err == nil || c.Healthy() {
			return c, err
		}
		survivors, err := c.Shrink(ctx, 3) // rank 3 is lost
		return survivors, errors.Join(err, c.Close())
	}
	_ = average
}

// Which NCCL there is.
func ExampleVersion() {
	version, library, err := nccl.Version()
	if err != nil {
		fmt.Println(err) // says where it was looked for
		return
	}
	fmt.Println(version, library)
}

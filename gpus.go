package tutti

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// runGPUs runs body for each rank of this process, on its own GPU. A process of a job has one rank, on the GPU with its
// number on this host. Otherwise ranks is the number of ranks, 0 for all GPUs.
func runGPUs(ctx context.Context, job rendezvous.Job, ranks int, body func(ctx context.Context, r Rank) error) error {
	devices, err := cuda.Devices()
	if err != nil {
		return err
	}
	indices, err := chooseGPUs(job, ranks, len(devices))
	if err != nil {
		return err
	}
	runtimes, err := openGPUs(indices)
	if err == nil {
		err = runOn(ctx, job, runtimes, body)
	}
	for _, rt := range runtimes {
		err = errors.Join(err, rt.Close())
	}
	return err
}

// chooseGPUs returns the numbers of the GPUs that this process works on, of as many as it sees.
func chooseGPUs(job rendezvous.Job, ranks, gpus int) ([]int, error) {
	if job.WorldSize > 1 {
		switch {
		case job.LocalRank < gpus:
			return []int{job.LocalRank}, nil
		case gpus == 1: // the launcher shows each process its own
			return []int{0}, nil
		}
		return nil, fmt.Errorf("%w: rank %d is process %d of this host, which has %d GPUs: start a process for each GPU",
			comm.ErrUnavailable, job.Rank, job.LocalRank+1, gpus)
	}
	if gpus == 0 || ranks > gpus {
		return nil, fmt.Errorf("%w: %d ranks with a GPU each, and this process sees %d",
			comm.ErrUnavailable, max(ranks, 1), gpus)
	}
	if ranks == 0 {
		ranks = gpus
	}
	indices := make([]int, ranks)
	for i := range indices {
		indices[i] = i
	}
	return indices, nil
}

// openGPUs opens GPUs at the same time, as each takes a while. GPUs that were opened are returned with an error, too.
func openGPUs(indices []int) ([]*cuda.Runtime, error) {
	runtimes := make([]*cuda.Runtime, len(indices))
	errs := make([]error, len(indices))
	var all sync.WaitGroup
	for i, index := range indices {
		all.Go(func() {
			runtimes[i], errs[i] = cuda.Open(index)
		})
	}
	all.Wait()
	opened := slices.DeleteFunc(runtimes, func(rt *cuda.Runtime) bool { return rt == nil })
	return opened, errors.Join(errs...)
}

// runOn makes the communicators and runs body on them.
func runOn(
	ctx context.Context,
	job rendezvous.Job,
	runtimes []*cuda.Runtime,
	body func(ctx context.Context, r Rank) error,
) error {
	worlds, err := connectGPUs(ctx, job, runtimes)
	if err != nil {
		return err
	}
	comms := make([]comm.Communicator, len(worlds))
	for i, world := range worlds {
		comms[i] = world
	}
	return comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) error {
		rt := worlds[slices.Index(comms, c)].Runtime()
		return instrument.Run(ctx, rt, c, func(ctx context.Context, c comm.Communicator) error {
			return body(ctx, Rank{Comm: c, Runtime: rt})
		})
	})
}

// connectGPUs connects the ranks of this process, with those of the job's other processes if it has any.
func connectGPUs(ctx context.Context, job rendezvous.Job, runtimes []*cuda.Runtime) ([]*nccl.Comm, error) {
	if job.WorldSize == 1 {
		return nccl.InProcess(ctx, runtimes)
	}
	world, err := nccl.FromEnv(ctx, runtimes[0])
	if err != nil {
		return nil, err
	}
	return []*nccl.Comm{world}, nil
}

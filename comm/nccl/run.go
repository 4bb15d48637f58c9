package nccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Run calls body for each rank of this process with a communicator of [New], each on its own goroutine ([comm.Run]).
// It closes the communicators and the GPUs when all bodies have returned, and returns their errors joined.
func Run(ctx context.Context, ranks int, body func(ctx context.Context, c *Comm) error, opts ...Option) error {
	world, err := New(ctx, ranks, opts...)
	if err != nil {
		return err
	}
	comms := make([]comm.Communicator, len(world))
	runtimes := make([]*cuda.Runtime, len(world))
	for i, c := range world {
		comms[i] = c
		runtimes[i] = c.rt
	}
	err = comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) error {
		return body(ctx, c.(*Comm))
	})
	return cmp.Or(err, closeGPUs(runtimes)) // what a body that failed has not freed is no news
}

// New opens a GPU for each rank of this process and makes the ranks' communicators. The caller closes them, and then
// the runtime of each ([Comm.Runtime]).
//
// A process of a job has one rank ([FromEnv]), on the GPU with its number on this host, or on the only one that it
// sees; ranks is then 0 or the number of the job's processes. Otherwise ranks is how many goroutines of this process
// are ranks ([InProcess]), 0 for one on each GPU. If there are fewer GPUs than ranks, the error is
// [comm.ErrUnavailable].
func New(ctx context.Context, ranks int, opts ...Option) ([]*Comm, error) {
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return nil, err
	}
	gpus, err := cuda.Count()
	if err != nil {
		return nil, err
	}
	indices, err := chooseGPUs(job, ranks, gpus)
	if err != nil {
		return nil, fmt.Errorf("nccl: %w", err)
	}
	runtimes, err := openGPUs(indices)
	if err != nil {
		return nil, err
	}
	world, err := connectGPUs(ctx, job, runtimes, opts)
	if err != nil {
		return nil, errors.Join(err, closeGPUs(runtimes))
	}
	return world, nil
}

// chooseGPUs returns the numbers of the GPUs that this process works on, of as many as it sees.
func chooseGPUs(job rendezvous.Job, ranks, gpus int) ([]int, error) {
	if job.WorldSize > 1 {
		switch {
		case ranks != 0 && ranks != job.WorldSize:
			return nil, fmt.Errorf("%w: %d ranks, but there is a process for each of %d; the launcher decides",
				comm.ErrArgument, ranks, job.WorldSize)
		case job.LocalRank < gpus:
			return []int{job.LocalRank}, nil
		case gpus == 1: // the launcher shows each process its own
			return []int{0}, nil
		}
		const format = "%w: rank %d is process %d of this host, which has %d GPUs: start at most one process per GPU"
		return nil, fmt.Errorf(format, comm.ErrUnavailable, job.Rank, job.LocalRank+1, gpus)
	}
	if ranks < 0 {
		return nil, fmt.Errorf("%w: %d ranks", comm.ErrArgument, ranks)
	}
	if ranks > gpus {
		return nil, fmt.Errorf("%w: %d ranks need %d GPUs, and this process sees %d",
			comm.ErrUnavailable, ranks, ranks, gpus)
	}
	indices := make([]int, cmp.Or(ranks, gpus))
	for i := range indices {
		indices[i] = i
	}
	return indices, nil
}

// openGPUs opens GPUs at the same time, as each takes a while.
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
	err := errors.Join(errs...)
	if err != nil {
		return nil, errors.Join(err, closeGPUs(runtimes))
	}
	return runtimes, nil
}

// closeGPUs closes those that are open; others are nil.
func closeGPUs(runtimes []*cuda.Runtime) error {
	var errs []error
	for _, rt := range runtimes {
		if rt != nil {
			errs = append(errs, rt.Close())
		}
	}
	return errors.Join(errs...)
}

// connectGPUs makes the communicators of this process.
func connectGPUs(
	ctx context.Context, job rendezvous.Job, runtimes []*cuda.Runtime, opts []Option,
) ([]*Comm, error) {
	if job.WorldSize > 1 {
		c, err := FromEnv(ctx, runtimes[0], opts...)
		if err != nil {
			return nil, err
		}
		return []*Comm{c}, nil
	}
	return InProcess(ctx, runtimes, opts...)
}

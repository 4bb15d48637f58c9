// Package gpus has a rank on each GPU of this process, connected over NCCL: package tutti runs programs on them, and
// the command its measurements.
package gpus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Run calls body for each rank of this process, on the GPUs that [Choose] returns for ranks. It returns when all bodies
// have returned, with their errors joined ([comm.Run]), and closes the communicators and the GPUs. The error is
// [comm.ErrUnavailable] if there are too few GPUs.
func Run(
	ctx context.Context,
	job rendezvous.Job,
	ranks int,
	body func(ctx context.Context, world comm.Communicator, rt runtime.Runtime) error,
) error {
	devices, err := cuda.Devices()
	if err != nil {
		return err
	}
	indices := Choose(job, ranks, len(devices))
	if len(indices) == 0 {
		return tooFew(job, ranks, len(devices))
	}
	runtimes, err := Open(indices)
	if err == nil {
		err = runOn(ctx, job, runtimes, body)
	}
	for _, rt := range runtimes {
		err = errors.Join(err, rt.Close())
	}
	return err
}

// Choose returns the numbers of the GPUs that this process works on, of as many as it sees: nil if they are too few. A
// process of a job has one rank, on the GPU with its number on this host. Otherwise ranks is the number of ranks, 0 for
// all GPUs.
func Choose(job rendezvous.Job, ranks, visible int) []int {
	if job.WorldSize > 1 {
		switch {
		case job.LocalRank < visible:
			return []int{job.LocalRank}
		case visible == 1: // the launcher shows each process its own
			return []int{0}
		}
		return nil
	}
	if ranks > visible {
		return nil
	}
	if ranks == 0 {
		ranks = visible
	}
	var indices []int
	for i := range ranks {
		indices = append(indices, i)
	}
	return indices
}

// tooFew is the error for GPUs of which [Choose] returns none.
func tooFew(job rendezvous.Job, ranks, visible int) error {
	if job.WorldSize > 1 {
		return fmt.Errorf("%w: rank %d is process %d of this host, which has %d GPUs: start a process for each GPU",
			comm.ErrUnavailable, job.Rank, job.LocalRank+1, visible)
	}
	return fmt.Errorf("%w: %d ranks with a GPU each, and this process sees %d",
		comm.ErrUnavailable, max(ranks, 1), visible)
}

// Open opens GPUs at the same time, as each takes a while. GPUs that were opened are returned with an error, too.
func Open(indices []int) ([]*cuda.Runtime, error) {
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
	body func(ctx context.Context, world comm.Communicator, rt runtime.Runtime) error,
) error {
	worlds, err := Connect(ctx, job, runtimes)
	if err != nil {
		return err
	}
	comms := make([]comm.Communicator, len(worlds))
	for i, world := range worlds {
		comms[i] = world
	}
	return comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) error {
		return body(ctx, c, worlds[slices.Index(comms, c)].Runtime())
	})
}

// Connect connects the ranks of this process, with those of the job's other processes if it has any.
func Connect(ctx context.Context, job rendezvous.Job, runtimes []*cuda.Runtime) ([]*nccl.Comm, error) {
	if job.WorldSize == 1 {
		return nccl.InProcess(ctx, runtimes)
	}
	world, err := nccl.FromEnv(ctx, runtimes[0])
	if err != nil {
		return nil, err
	}
	return []*nccl.Comm{world}, nil
}

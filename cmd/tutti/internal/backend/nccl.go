package backend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// ncclBackend is a rank per GPU (comm/nccl): goroutines of this process, or,
// where a launcher started several processes, one rank in each.
var ncclBackend = Backend{
	Name:    "nccl",
	Jobs:    true,
	Summary: "NVIDIA GPUs of this process, or one of each process of a job",
	Probe:   probeNCCL,
	Run:     runNCCL,
}

func probeNCCL(context.Context) (string, error) {
	g := LookForGPUs()
	if err := g.Usable(); err != nil {
		return "", err
	}
	driver := "driver"
	if g.Driver != "" {
		driver += " " + g.Driver
	}
	return fmt.Sprintf("%s; %s for CUDA %s; NCCL %s; %s",
		Counted(len(g.Devices), "GPU"), driver, g.CUDA, g.NCCL, g.NCCLLibrary), nil
}

// runNCCL runs body for every rank of this process.
func runNCCL(ctx context.Context, opts Options, body func(context.Context, Rank) error) error {
	g := LookForGPUs()
	if err := g.Usable(); err != nil {
		return err
	}
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return err
	}
	indices, err := chooseGPUs(job, opts.Ranks, len(g.Devices))
	if err != nil {
		return err
	}
	if job.Rank == 0 {
		if err := opts.prepare(); err != nil {
			return err
		}
	}
	runtimes, err := openGPUs(indices)
	if err == nil {
		err = runOn(ctx, job, runtimes, opts, body)
	}
	for _, rt := range runtimes {
		err = errors.Join(err, rt.Close())
	}
	return err
}

// chooseGPUs returns the numbers of the GPUs that this process works on, of as many
// as it sees.
func chooseGPUs(job rendezvous.Job, ranks, gpus int) ([]int, error) {
	if job.WorldSize > 1 {
		if err := checkRanks("nccl", job.Launcher, ranks, job.WorldSize); err != nil {
			return nil, err
		}
		switch {
		case job.LocalRank < gpus:
			return []int{job.LocalRank}, nil
		case gpus == 1: // the launcher shows each process its own
			return []int{0}, nil
		}
		return nil, refuse("rank %d is process %d of this host but sees %s; start at most one process per GPU",
			job.Rank, job.LocalRank+1, Counted(gpus, "GPU"))
	}
	if ranks > gpus {
		return nil, refuse("--ranks %d, but a rank needs a GPU of its own and this process sees %s",
			ranks, Counted(gpus, "GPU"))
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

// refuse makes an [OptionError].
func refuse(format string, args ...any) error {
	return &OptionError{Backend: "nccl", Reason: fmt.Sprintf(format, args...)}
}

// openGPUs opens GPUs at the same time, as each takes a while. GPUs that were opened are returned with an error, too.
func openGPUs(indices []int) ([]*cuda.Runtime, error) {
	all := make([]*cuda.Runtime, len(indices))
	errs := make([]error, len(indices))
	var wg sync.WaitGroup
	for i, index := range indices {
		wg.Go(func() {
			all[i], errs[i] = cuda.Open(index)
		})
	}
	wg.Wait()
	isNil := func(rt *cuda.Runtime) bool {
		return rt == nil
	}
	return slices.DeleteFunc(all, isNil), errors.Join(errs...)
}

// runOn makes the communicators and runs body on them.
func runOn(
	ctx context.Context,
	job rendezvous.Job,
	runtimes []*cuda.Runtime,
	opts Options,
	body func(context.Context, Rank) error,
) error {
	bases, err := connect(ctx, job, runtimes, opts)
	if err != nil {
		return err
	}
	comms, err := overPeerMemory(ctx, bases, opts)
	if err != nil {
		for _, c := range comms {
			err = errors.Join(err, c.Close())
		}
		return err
	}
	return comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) (err error) {
		base := bases[slices.Index(comms, c)]
		rt := base.Runtime()
		r := Rank{
			Runtime:  rt,
			Location: location(rt),
			limit:    opts.Timeout,
		}
		r.Comm = r.Watch(ctx, c)
		stream := &cudaQueue{
			rt:     rt,
			stream: base.Stream(),
			bound:  r.Comm,
		}
		compute := &cudaQueue{
			rt:     rt,
			stream: rt.Stream(),
			bound:  r.Comm,
		}
		defer func() {
			err = errors.Join(err, stream.free(), compute.free())
		}()
		r.Stream = stream
		r.Compute = compute
		return body(ctx, r)
	})
}

// overPeerMemory puts communicators over peer memory on top of those of this
// process, if that was asked for; they close them.
func overPeerMemory(ctx context.Context, bases []*nccl.Comm, opts Options) ([]comm.Communicator, error) {
	comms := make([]comm.Communicator, len(bases))
	for i, base := range bases {
		comms[i] = base
	}
	if !opts.PeerMemory {
		return comms, nil
	}
	ctx, cancel := withLimit(ctx, opts.Timeout)
	defer cancel()
	errs := make([]error, len(bases))
	var wg sync.WaitGroup
	for i, base := range bases {
		wg.Go(func() {
			var c comm.Communicator
			c, errs[i] = p2p.New(ctx, base, base.Runtime())
			if errs[i] == nil {
				comms[i] = c
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if errors.Is(err, comm.ErrUnsupported) { // as on all ranks
			return comms, refuse("--p2p: %v", err)
		}
	}
	return comms, errors.Join(errs...)
}

// connect makes the communicators of this process.
func connect(ctx context.Context, job rendezvous.Job, runtimes []*cuda.Runtime, opts Options) ([]*nccl.Comm, error) {
	ctx, cancel := withLimit(ctx, opts.Timeout)
	defer cancel()
	if job.WorldSize == 1 {
		return nccl.InProcess(ctx, runtimes)
	}
	c, err := nccl.FromEnv(ctx, runtimes[0])
	if err != nil {
		return nil, err
	}
	return []*nccl.Comm{c}, nil
}

// location describes where a rank is, much as nccl-tests does.
func location(rt *cuda.Runtime) string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%v %s, PCI %s, %s, pid %d", rt.Device(), rt.Name(), rt.Info().PCIBus, host, os.Getpid())
}

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

// ncclBackend has one rank per GPU (comm/nccl): goroutines of this process or, if a launcher started several
// processes, one rank in each.
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
	if err := checkGPUs(job, opts.Ranks, len(g.Devices)); err != nil {
		return err
	}
	if job.Rank == 0 {
		if err := opts.prepare(); err != nil {
			return err
		}
	}
	bases, err := connect(ctx, opts)
	if err != nil {
		return err
	}
	err = runOn(ctx, bases, opts, body)
	for _, base := range bases {
		err = errors.Join(err, base.Runtime().Close())
	}
	return err
}

// checkGPUs returns an error that names the option if --ranks (0 if it was left out) differs from the launcher's
// number or exceeds this process's GPUs.
func checkGPUs(job rendezvous.Job, ranks, gpus int) error {
	if job.WorldSize > 1 {
		return checkRanks("nccl", job.Launcher, ranks, job.WorldSize)
	}
	if ranks > gpus {
		return refuse("--ranks %d, but a rank needs a GPU of its own and this process sees %s",
			ranks, Counted(gpus, "GPU"))
	}
	return nil
}

// refuse makes an [OptionError].
func refuse(format string, args ...any) error {
	return &OptionError{Backend: "nccl", Reason: fmt.Sprintf(format, args...)}
}

// connect makes this process's communicators on GPUs that it opens.
func connect(ctx context.Context, opts Options) ([]*nccl.Comm, error) {
	ctx, cancel := withLimit(ctx, opts.Timeout)
	defer cancel()
	return nccl.New(ctx, opts.Ranks)
}

// runOn runs body on communicators and closes them.
func runOn(
	ctx context.Context,
	bases []*nccl.Comm,
	opts Options,
	body func(context.Context, Rank) error,
) error {
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

// overPeerMemory layers communicators over peer memory on this process's communicators, if the user asked for it.
// Closing the upper ones closes the lower ones.
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
		if errors.Is(err, comm.ErrUnsupported) { // all ranks get the same error
			return comms, refuse("--p2p: %v", err)
		}
	}
	return comms, errors.Join(errs...)
}

// location describes where a rank runs, much as nccl-tests does.
func location(rt *cuda.Runtime) string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%v %s, PCI %s, %s, pid %d", rt.Device(), rt.Name(), rt.Info().PCIBus, host, os.Getpid())
}

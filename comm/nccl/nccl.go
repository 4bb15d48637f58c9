// Package nccl is the [comm.Communicator] of NVIDIA GPUs, on NCCL 2.18 or newer.
//
// The library is opened when the first communicator is made, never linked. Each
// communicator has a stream of its own on its runtime's device and submits
// there; [comm.StreamOrder] and [comm.StreamSyncOps] order it against other
// streams, as package distributed does with the runtime's compute stream.
//
// NCCL matches messages between two ranks by order alone, so tags are ignored.
// It does not tell when a message has another length than its receive. A send or
// receive outside a Group holds up what its rank submits later until the peer's
// side is there.
package nccl

import (
	"context"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Option changes how a communicator is made.
type Option func(*options)

type options struct {
	minCTAs, maxCTAs int
	oneProcess       bool // all ranks are goroutines of this process
}

// WithCTAs bounds the number of thread blocks (CTAs) that a collective may
// occupy, and so the multiprocessors it takes away from compute that runs
// beside it. Zero leaves a bound to NCCL. All ranks pass the same.
func WithCTAs(minimum, maximum int) Option {
	return func(o *options) { o.minCTAs, o.maxCTAs = minimum, maximum }
}

func collect(opts []Option) (o options) {
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// InProcess makes one communicator per runtime, for the goroutines of this
// process: number i is rank i of len(runtimes), on runtimes[i].
func InProcess(ctx context.Context, runtimes []*cuda.Runtime, opts ...Option) ([]*Comm, error) {
	lib, err := open()
	if err != nil {
		return nil, err
	}
	if len(runtimes) == 0 || slices.Contains(runtimes, nil) {
		return nil, fmt.Errorf("nccl: %w: no runtimes, or one is nil", comm.ErrArgument)
	}
	id, err := lib.newID()
	if err != nil {
		return nil, err
	}
	// The failure of one ends the wait of the others for it.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	comms := make([]*Comm, len(runtimes))
	var first error
	var once sync.Once
	var wg sync.WaitGroup
	for rank, rt := range runtimes {
		wg.Go(func() {
			o := collect(opts)
			o.oneProcess = true
			c, err := lib.join(ctx, rt, id, rank, len(runtimes), o)
			if err != nil {
				once.Do(func() { first = err })
				cancel(err)
				return
			}
			comms[rank] = c
		})
	}
	wg.Wait()
	if first == nil {
		return comms, nil
	}
	errs := []error{first}
	for _, c := range comms {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return nil, errors.Join(errs...)
}

// From makes a communicator of the ranks of base, each on its own rt, and is
// collective on base. The unique id travels over base, which may be any
// communicator (MPI, local, another NCCL) and stays open.
func From(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, opts ...Option) (*Comm, error) {
	if base == nil || rt == nil {
		return nil, fmt.Errorf("nccl: %w: base communicator or runtime is nil", comm.ErrArgument)
	}
	lib, err := open()
	var id uniqueID
	if err == nil && base.Rank() == 0 {
		id, err = lib.newID()
	}
	// A rank without NCCL still takes part, so that the others hear of it.
	id, failed, shareErr := shareID(ctx, base, rt, id, err != nil)
	switch {
	case err != nil:
		return nil, err
	case shareErr != nil:
		return nil, fmt.Errorf("nccl: sharing the unique id: %w", shareErr)
	case failed > 0:
		return nil, fmt.Errorf("nccl: %w: %d of %d ranks cannot use NCCL", comm.ErrPeerFailed, failed, base.WorldSize())
	}
	return lib.join(ctx, rt, id, base.Rank(), base.WorldSize(), collect(opts))
}

// join makes rank's communicator; all ranks call it with the same id.
func (l *library) join(ctx context.Context, rt *cuda.Runtime, id uniqueID, rank, size int, o options) (*Comm, error) {
	cfg := o.config(false)
	control, err := l.create(ctx, rt, 0, l.sym.InitRankConfig, func(cell uintptr) uintptr {
		return callInitRank(l.sym.InitRankConfig, cell, size, &id, rank, hostmem.AddrOf(cfg))
	})
	goruntime.KeepAlive(cfg)
	if err != nil {
		return nil, &comm.OpError{Backend: "nccl", Op: "init", Rank: rank, Err: err}
	}
	return newComm(ctx, l, rt, control, o)
}

// FromEnv makes a communicator of the processes that a launcher started
// (torchrun, Open MPI's or MPICH's mpirun, srun), each on its own rt; see
// [rendezvous.FromEnv] for the variables. rank 0's unique id travels over TCP.
func FromEnv(ctx context.Context, rt *cuda.Runtime, opts ...Option) (*Comm, error) {
	if rt == nil {
		return nil, fmt.Errorf("nccl: %w: runtime is nil", comm.ErrArgument)
	}
	lib, err := open()
	if err != nil {
		return nil, err
	}
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return nil, err
	}
	var id uniqueID
	var own []byte // nothing, if rank 0 cannot make an id: so the others hear of it
	var failed error
	if job.Rank == 0 {
		if id, failed = lib.newID(); failed == nil {
			own = id[:]
		}
	}
	payload, err := job.Broadcast(ctx, own)
	switch {
	case failed != nil:
		return nil, failed
	case err != nil:
		return nil, err
	case len(payload) != len(id):
		return nil, fmt.Errorf("nccl: %w: rank 0 sent no unique id but %d bytes", comm.ErrPeerFailed, len(payload))
	}
	copy(id[:], payload)
	return lib.join(ctx, rt, id, job.Rank, job.WorldSize, collect(opts))
}

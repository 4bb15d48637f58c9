package mpi

import (
	"context"
	"errors"
	"os"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/segment"
)

const sharedOff = "off" // of TUTTI_MPI_SHARED

// sharable returns why this process cannot share memory with others on its host.
func sharable() error {
	if os.Getenv(env.MPIShared) == sharedOff {
		return errors.New(env.MPIShared + "=" + sharedOff)
	}
	return segment.Probe()
}

// share has the ranks share memory: rank 0 makes it, and it is used if all others can map it. It
// is collective.
func (e *endpoint) share(ctx context.Context) error {
	if e.native() {
		e.unshared = errors.New("collectives are native")
	}
	if e.native() || e.size == 1 {
		return nil
	}
	var memory []byte
	bytes := schedule.SegmentBytes(e.size)
	out := newCells() // an offer, and whether this rank has the memory; MPI's after an error
	offer := &hostmem.Slice[segment.Offer](out.addr(0), 1)[0]
	all := &hostmem.Slice[uint64](out.addr(3), 1)[0]
	reason := sharable()
	if e.rank == 0 && reason == nil {
		var server *segment.Server
		server, memory, reason = segment.Serve(bytes)
		if reason == nil {
			defer server.Close()
			*offer = server.Offer()
		}
	}
	defer func() {
		if e.shared == nil && memory != nil {
			segment.Unmap(memory)
		}
	}()
	if err := e.SetUp(ctx, comm.BroadcastCall(out.addr(0), 3, dtype.U64, 0)); err != nil {
		return err
	}
	if e.rank > 0 && reason == nil {
		memory, reason = segment.Join(ctx, *offer, bytes)
	}
	if reason == nil {
		*all = 1
	}
	if err := e.SetUp(ctx, comm.AllReduceCall(out.addr(3), out.addr(3), 1, dtype.U64, comm.Min)); err != nil {
		return err
	}
	shared := *all == 1
	out.free()
	if shared {
		e.shared = memory
		e.Share(memory, nil)
		return nil
	}
	e.unshared = reason
	if reason == nil { // this rank could
		e.unshared = errors.New("not all ranks can")
	}
	return nil
}

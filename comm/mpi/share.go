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

// offer is what the other ranks need to get the memory that rank 0 has made: zero if it has made none.
type offer struct {
	machine uint64
	key     segment.Key
}

// makeOffer has rank 0 make memory, and returns what the others need to get it.
func makeOffer(bytes int) (s *segment.Server, o offer, memory []byte, err error) {
	if o.machine, err = segment.Machine(); err != nil {
		return nil, offer{}, nil, err
	}
	if s, err = segment.NewServer(); err != nil {
		return nil, offer{}, nil, err
	}
	if memory, err = s.Offer(0, bytes); err != nil {
		s.Close()
		return nil, offer{}, nil, err
	}
	o.key = s.Key()
	return s, o, memory, nil
}

// accept returns the memory of an offer.
func (o *offer) accept(ctx context.Context, bytes int) ([]byte, error) {
	if o.machine == 0 {
		return nil, errors.New("rank 0 has no memory to share")
	}
	machine, err := segment.Machine()
	if err != nil {
		return nil, err
	}
	if machine != o.machine {
		return nil, errors.New("rank 0 is on another host, or of another user or namespace")
	}
	return segment.Join(ctx, o.key, 0, bytes)
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
	o := &hostmem.Slice[offer](out.addr(0), 1)[0]
	all := &hostmem.Slice[uint64](out.addr(3), 1)[0]
	reason := sharable()
	if e.rank == 0 && reason == nil {
		var server *segment.Server
		if server, *o, memory, reason = makeOffer(bytes); reason == nil {
			defer server.Close()
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
		memory, reason = o.accept(ctx, bytes)
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
		e.Share(memory)
	} else if e.unshared = reason; reason == nil {
		e.unshared = errors.New("not all ranks can")
	}
	return nil
}

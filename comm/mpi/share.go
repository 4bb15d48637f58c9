package mpi

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/memfd"
)

const sharedOff = "off" // of TUTTI_MPI_SHARED

// sharable returns why this process cannot share memory with others on its host.
func sharable() error {
	if os.Getenv(env.MPIShared) == sharedOff {
		return errors.New(env.MPIShared + "=" + sharedOff)
	}
	fd, memory, err := createShared("tutti", os.Getpagesize())
	if err == nil {
		memfd.Unmap(memory)
		memfd.Close(fd)
	}
	return err
}

// createShared makes memory for this process and those that open it.
func createShared(name string, bytes int) (fd int, memory []byte, err error) {
	if fd, err = memfd.Create(name, bytes); err != nil {
		return 0, nil, err
	}
	if memory, err = memfd.Map(fd, bytes); err != nil {
		memfd.Close(fd)
	}
	return fd, memory, err
}

// offer says where rank 0 has made the memory.
type offer struct{ pid, fd, token uint64 }

func (o *offer) name() string { return fmt.Sprintf("tutti-%016x", o.token) }

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
		made := offer{pid: uint64(os.Getpid()), token: rand.Uint64()}
		var fd int
		if fd, memory, reason = createShared(made.name(), bytes); reason == nil {
			defer memfd.Close(fd)
			made.fd = uint64(fd)
			*o = made
		}
	}
	defer func() {
		if e.shared == nil && memory != nil {
			memfd.Unmap(memory)
		}
	}()
	if err := e.SetUp(ctx, comm.BroadcastCall(out.addr(0), 3, dtype.U64, 0)); err != nil {
		return err
	}
	switch {
	case e.rank == 0 || reason != nil:
	case o.pid == 0:
		reason = errors.New("rank 0 has no memory to share")
	default:
		memory, reason = openShared(
			int(o.pid),
			int(o.fd),
			o.name(),
			bytes,
		)
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

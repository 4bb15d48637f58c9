package mpi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// duplicate makes an MPI communicator of the same ranks, whose messages never match those of other
// parts of the program. It is collective.
func (s *state) duplicate(handle uintptr) (uintptr, error) {
	out := newCells()
	defer out.free()
	if err := s.lib.reach(s.lib.CommDup, handle, out.addr(0)); err != nil {
		return 0, err
	}
	return s.lib.handle(out, 0), nil
}

// wrap makes an endpoint from an MPI communicator.
func (s *state) wrap(handle uintptr) (*endpoint, error) {
	lib := s.lib
	if err := lib.must(lib.CommSetErrhandler, handle, lib.handles.errorsReturn); err != nil {
		return nil, err
	}
	rank, size, err := lib.place(handle)
	if err != nil {
		return nil, err
	}
	e := s.newEndpoint(rank, size, handle)
	s.progress.add(e)
	return e, nil
}

// place returns this process's rank in an MPI communicator, and how many there are.
func (l *library) place(handle uintptr) (rank, size int, err error) {
	out := newCells()
	defer out.free()
	if err = l.must(l.CommRank, handle, out.addr(0)); err == nil {
		err = l.must(l.CommSize, handle, out.addr(1))
	}
	return int(out.int32(0)), int(out.int32(1)), err
}

// makeSub makes a sub-communicator with MPI_Comm_split, between barriers that ctx can end.
// The call itself cannot be interrupted: when ctx ends in it, or another rank reports that it
// failed there, makeSub returns and leaves the call behind. In the second barrier ranks learn
// that one has failed. After the third all have set the sub-communicator up, and it may be
// used, and closed. If the library has refused it to all ranks, this one goes on.
func (e *endpoint) makeSub(ctx context.Context, color, key int) (*endpoint, error) {
	const op = comm.OpSplit
	if err := e.Barrier(ctx, op, true); err != nil {
		return nil, err
	}
	group, place, err := e.agreeOnGroups(ctx, color, key)
	if err != nil {
		return nil, err
	}
	made := make(chan *endpoint, 1)
	done := make(chan error, 1)
	go func() {
		child, err := e.split(group, place)
		made <- child
		done <- err
	}()
	err = e.await(ctx, done)
	var child *endpoint
	select {
	case child = <-made:
	default: // the call was left behind
	}
	if err == nil || errors.Is(err, comm.ErrExhausted) {
		everywhere, voteErr := e.refusedByAll(ctx, err)
		if everywhere {
			return nil, err
		}
		err = cmp.Or(err, voteErr)
	}
	if err != nil {
		err = e.Fail(op, err)
	} else {
		err = e.Barrier(ctx, op, false)
	}
	if err == nil && child != nil {
		if err = child.share(ctx); err != nil {
			err = e.Fail(op, err)
		}
	}
	if err == nil {
		if err = e.Barrier(ctx, op, false); err == nil {
			return child, nil
		}
	}
	if child != nil {
		child.abandon(err)
	}
	e.state.failed.CompareAndSwap(nil, &err)
	return nil, err
}

// agreeOnGroups tells the ranks each other's colors and keys, of which MPI would take 32 bits. It returns the number of
// this rank's group, -1 for none, and its place there.
func (e *endpoint) agreeOnGroups(ctx context.Context, color, key int) (group, place int, err error) {
	memory, err := host.Allocate(16 * e.size)
	if err != nil {
		return 0, 0, err
	}
	all := hostmem.Slice[int64](memory, 2*e.size)
	all[2*e.rank] = int64(color)
	all[2*e.rank+1] = int64(key)
	part := memory + uintptr(16*e.rank)
	if err := e.SetUp(ctx, comm.AllGatherCall(part, memory, 2, dtype.I64)); err != nil {
		return 0, 0, err // MPI may still write to the memory
	}
	splits := make([]comm.Wait, e.size)
	for r := range splits {
		splits[r] = comm.Wait{Op: comm.OpSplit, Color: int(all[2*r]), Key: int(all[2*r+1])}
	}
	_ = host.Deallocate(memory)
	for i, members := range backend.SplitGroups(splits) {
		if place := slices.Index(members, e.rank); place >= 0 {
			return i, place, nil
		}
	}
	return -1, 0, nil
}

// refusedByAll reports whether the library has refused the sub-communicator to all ranks. A rank to which it has,
// because of refusal, does not wait forever for those that are still in the call.
func (e *endpoint) refusedByAll(ctx context.Context, refusal error) (everywhere bool, err error) {
	out := newCells() // MPI's after an error
	refused := &hostmem.Slice[uint64](out.addr(0), 1)[0]
	if refusal != nil {
		*refused = 1
		bounded, cancel := context.WithTimeoutCause(ctx, backend.HostTimeout, refusal)
		defer cancel()
		ctx = bounded
	}
	call := comm.AllReduceCall(out.addr(0), out.addr(0), 1, dtype.U64, comm.Sum)
	if err := e.SetUp(ctx, call); err != nil {
		return false, err
	}
	n := *refused
	out.free()
	if n > 0 && n < uint64(e.size) {
		return false, fmt.Errorf("%w: MPI_Comm_split has failed on %d of %d ranks", comm.ErrExhausted, n, e.size)
	}
	return n > 0, nil
}

// abandon closes an endpoint that this rank has not used. It is not freed, as some ranks may
// not have it. Ranks that have it are notified.
func (e *endpoint) abandon(cause error) {
	_ = e.Fail(comm.OpSplit, cause)
	e.state.progress.remove(e)
}

// await waits for a call of MPI in another goroutine, until ctx ends or another rank aborts.
//
// A library that allows one call at a time receives no control messages meanwhile. When ctx
// has ended, it cannot be called again, and no communicator can be used any more.
func (e *endpoint) await(ctx context.Context, done <-chan error) error {
	var look <-chan time.Time
	if e.lib.turn == nil {
		tick := time.NewTicker(controlTick)
		defer tick.Stop()
		look = tick.C
	}
	for {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			select {
			case err := <-done: // at the same time
				return err
			default:
			}
			e.lib.turn.leave()
			return comm.ContextError(ctx)
		case <-look:
			if err := e.Attend(); err != nil {
				return err
			}
		}
	}
}

// split calls MPI_Comm_split and wraps the result, nil for a negative group.
func (e *endpoint) split(group, place int) (*endpoint, error) {
	lib := e.lib
	color := int32(group)
	if group < 0 {
		color = lib.abi.undefined
	}
	out := newCells()
	defer out.free()
	err := lib.reach(
		lib.CommSplit,
		e.handle,
		uintptr(color),
		uintptr(place),
		out.addr(0),
	)
	if err != nil || group < 0 {
		return nil, err
	}
	return e.state.wrap(lib.handle(out, 0))
}

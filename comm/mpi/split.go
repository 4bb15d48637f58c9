package mpi

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// duplicate makes a communicator of the same ranks for this package's own messages, which
// never match those of users. It is collective.
func (s *state) duplicate(pub uintptr) (uintptr, error) {
	out := newCells()
	defer out.free()
	if err := s.lib.reach(s.lib.CommDup, pub, out.addr(0)); err != nil {
		return 0, err
	}
	return s.lib.handle(out, 0), nil
}

// wrap makes an endpoint from an MPI communicator and its duplicate.
func (s *state) wrap(pub, inner uintptr) (*endpoint, error) {
	lib := s.lib
	for _, handle := range []uintptr{pub, inner} {
		err := lib.must(lib.CommSetErrhandler, handle, lib.handles.errorsReturn)
		if err != nil {
			return nil, err
		}
	}
	rank, size, err := lib.place(pub)
	if err != nil {
		return nil, err
	}
	e := s.newEndpoint(rank, size, pub, inner)
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
// used, and closed.
func (e *endpoint) makeSub(ctx context.Context, color, key int) (*endpoint, error) {
	const op = comm.OpSplit
	if color > math.MaxInt32 || key > math.MaxInt32 || key < math.MinInt32 {
		return nil, fmt.Errorf("%w: color %d or key %d does not fit in 32 bits", comm.ErrArgument, color, key)
	}
	if err := e.Barrier(ctx, op, true); err != nil {
		return nil, err
	}
	made := make(chan *endpoint, 1)
	done := make(chan error, 1)
	go func() {
		child, err := e.split(color, key)
		made <- child
		done <- err
	}()
	err := e.await(ctx, done)
	var child *endpoint
	select {
	case child = <-made:
	default: // the call was left behind
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

// split calls MPI_Comm_split and wraps the result, nil for a negative color.
func (e *endpoint) split(color, key int) (*endpoint, error) {
	lib := e.lib
	s := e.state
	mpiColor := int32(max(color, -1))
	if mpiColor < 0 {
		mpiColor = lib.abi.undefined
	}
	out := newCells()
	defer out.free()
	err := lib.reach(
		lib.CommSplit,
		e.pub,
		uintptr(mpiColor),
		uintptr(int32(key)),
		out.addr(0),
	)
	if err != nil || color < 0 {
		return nil, err
	}
	pub := lib.handle(out, 0)
	inner, err := s.duplicate(pub)
	if err != nil {
		return nil, err
	}
	child, err := s.wrap(pub, inner)
	if err != nil {
		return nil, err
	}
	return child, nil
}

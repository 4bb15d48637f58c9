package mpi

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/dl"
)

// duplicate makes a communicator of the same ranks, so that messages of
// collectives never meet those of users. It is collective. With interop there is none, as
// other programs would not take part.
func (s *state) duplicate(pub uintptr) (uintptr, error) {
	if s.collectives == interop {
		return pub, nil
	}
	out := newCells()
	defer out.free()
	if err := s.lib.reach(s.lib.CommDup, pub, out.at(0)); err != nil {
		return 0, err
	}
	return s.lib.handle(out, 0), nil
}

// wrap makes an endpoint of an MPI communicator and its duplicate.
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
	e := &endpoint{
		state: s, lib: lib, rank: rank, size: size, pub: pub, inner: inner,
		check: backend.Check{Backend: name, Rank: rank, WorldSize: size},
		table: requests{rank: rank, calls: dl.NewSequence(), handleSize: lib.abi.handleSize, statusSize: lib.abi.statusSize},
		peers: make([]peer, size),
	}
	e.notes.table = e.table
	e.notes.table.calls = dl.NewSequence()
	if e.native() {
		e.check.Supports = nativeSupports
	}
	s.progress.add(e)
	return e, nil
}

// place returns this process's rank in an MPI communicator, and how many there are.
func (l *library) place(handle uintptr) (rank, size int, err error) {
	out := newCells()
	defer out.free()
	if err = l.must(l.CommRank, handle, out.at(0)); err == nil {
		err = l.must(l.CommSize, handle, out.at(1))
	}
	return int(out.int32(0)), int(out.int32(1)), err
}

// splitOff is Split with MPI_Comm_split, between barriers that ctx can end. The
// call itself cannot be interrupted: when ctx ends in it, or another rank reports
// that it failed there, splitOff returns and leaves the call behind. The second
// barrier is where ranks learn that one has failed. After the third all have set the
// new communicator up, and it may be used, and left.
func (e *endpoint) splitOff(ctx context.Context, color, key int) (*endpoint, error) {
	const op = comm.OpSplit
	if color > math.MaxInt32 || key > math.MaxInt32 || key < math.MinInt32 {
		return nil, fmt.Errorf("%w: color %d or key %d is no 32-bit number", comm.ErrArgument, color, key)
	}
	if err := e.barrier(ctx, op); err != nil {
		return nil, err
	}
	made := make(chan *endpoint, 1)
	done := make(chan error, 1)
	go func() {
		child, err := e.split(color, key)
		made <- child
		done <- err
	}()
	tell := func(err error) error {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.fail(op.String(), err)
	}
	err := e.await(ctx, done)
	var child *endpoint
	select {
	case child = <-made:
	default: // the call was left behind
	}
	if err != nil {
		err = tell(err)
	} else {
		err = e.meet(ctx, op, false)
	}
	if err == nil && child != nil {
		if err = child.share(ctx); err != nil {
			err = tell(err)
		}
	}
	if err == nil {
		if err = e.meet(ctx, op, false); err == nil {
			return child, nil
		}
	}
	if child != nil {
		child.abandon(err)
	}
	e.state.failed.CompareAndSwap(nil, &err)
	return nil, err
}

// abandon closes an endpoint that nobody here has used. It is not freed, as not all
// ranks may have it, and those that do are told.
func (e *endpoint) abandon(cause error) {
	e.mu.Lock()
	_ = e.fail(comm.OpSplit.String(), cause)
	e.closed = true
	e.mu.Unlock()
	e.state.forget(e)
	e.state.progress.remove(e)
}

// noteTick is how often who waits for a call of MPI looks for notes.
const noteTick = 10 * time.Millisecond

// await waits for a call that MPI does in another goroutine, until ctx ends or a
// note tells that another rank has given up.
//
// A library that allows one call at a time cannot be asked for notes meanwhile, nor
// for anything else when ctx has ended: no communicator can be used any more.
func (e *endpoint) await(ctx context.Context, done <-chan error) error {
	var look <-chan time.Time
	if e.lib.turn == nil {
		tick := time.NewTicker(noteTick)
		defer tick.Stop()
		look = tick.C
	}
	for {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			select {
			case err := <-done: // just now
				return err
			default:
			}
			e.lib.turn.leave()
			return comm.ContextError(ctx)
		case <-look:
			e.mu.Lock()
			err := e.attend()
			e.mu.Unlock()
			if err != nil {
				return err
			}
		}
	}
}

// split calls MPI_Comm_split and wraps the result, nil for a negative color.
func (e *endpoint) split(color, key int) (*endpoint, error) {
	lib, s := e.lib, e.state
	mpiColor := int32(max(color, -1))
	if mpiColor < 0 {
		mpiColor = lib.abi.undefined
	}
	out := newCells()
	defer out.free()
	err := lib.reach(lib.CommSplit, e.pub, uintptr(mpiColor), uintptr(int32(key)), out.at(0))
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
	child.parent = e
	s.mu.Lock()
	defer s.mu.Unlock()
	s.splits = append(s.splits, child)
	return child, nil
}

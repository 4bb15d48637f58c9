package mpi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// closeTimeout bounds how long Close waits for operations in flight.
const closeTimeout = 5 * time.Second

// close waits for operations in flight, until ctx or closeTimeout, and says goodbye. It
// returns why operations are left in flight, also if that was found before.
func (e *endpoint) close(ctx context.Context) error {
	e.mu.Lock()
	closed, broken := e.closed, e.broken
	e.closed = true
	e.mu.Unlock()
	if closed {
		return broken
	}
	e.state.forget(e)
	bounded, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	if broken == nil {
		broken = e.wait(bounded, "close", true)
	}
	if broken != nil {
		e.state.progress.remove(e)
		receiving := e.drainReceives(bounded)
		slog.Warn("mpi: communicator closed with operations in flight",
			"rank", e.rank, "operations", e.inFlight.Load(), "receiving", receiving, "cause", broken)
		return broken
	}
	e.mu.Lock()
	e.notifyAll(controlMessage{kind: goodbye})
	e.leaving.Store(true)
	e.mu.Unlock()
	e.state.progress.releaseDeparted(ctx)
	e.state.progress.notify() // for later goodbyes
	return nil
}

// drainReceives keeps MPI from writing to memory of an aborted endpoint later: it cancels
// receives of messages that have not begun to come, and waits for the others until ctx ends.
// It returns how many are still coming.
func (e *endpoint) drainReceives(ctx context.Context) (receiving int) {
	for pace := (pause{}); ; pace.next() {
		e.mu.Lock()
		if e.broken != nil { // and has not departed
			receiving = e.table.cancel(e.lib, pace.first())
		}
		e.mu.Unlock()
		if receiving == 0 || ctx.Err() != nil {
			return receiving
		}
	}
}

// departs reports whether an endpoint that is leaving has gone. It may be freed if the
// goodbyes of all other ranks have come, so that nobody sends to it any more. It also has
// gone, and is not freed, if it has aborted.
func (e *endpoint) departs() (gone, free bool) {
	if !e.leaving.Load() {
		return false, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	broken := e.progressControl() != nil || e.receiveControl() != nil
	for src := range e.peers {
		broken = broken || e.aborted(src) != nil
	}
	switch {
	case !e.leaving.Load():
		return false, false
	case !broken && !e.interop() && (e.control.departed < e.size-1 || len(e.control.table.list) > 0):
		return false, false
	}
	e.leaving.Store(false)
	return true, !broken
}

// missing returns the ranks whose goodbyes a leaving endpoint waits for.
func (e *endpoint) missing() (ranks []int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for r := range e.peers {
		if e.leaving.Load() && r != e.rank && e.peers[r].last == nil {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// forget removes a sub-communicator from the register.
func (s *state) forget(e *endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.subs = slices.DeleteFunc(s.subs, func(other *endpoint) bool { return other == e })
}

// descendants returns the sub-communicators of e, and theirs, that are not closed.
func (s *state) descendants(e *endpoint) []*endpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []*endpoint
	for _, d := range s.subs {
		for p := d.parent; p != nil; p = p.parent {
			if p == e {
				found = append(found, d)
			}
		}
	}
	return found
}

// abort is [comm.Communicator.Abort].
func (e *endpoint) abort(cause error) {
	e.mu.Lock()
	if !e.closed && e.broken == nil {
		_ = e.fail("abort", cause)
	}
	e.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	e.drainReceives(ctx)
}

// release frees the memory and the MPI communicators of an endpoint that has departed. The
// standard calls MPI_Comm_free collective, and recommends a local implementation. A library
// that waits for other ranks gets until ctx or closeTimeout, after which MPI_Finalize is left
// out. The caller holds no lock.
func (e *endpoint) release(ctx context.Context) {
	e.table.release()
	e.scratch.release()
	e.heads.release()
	e.control.table.release()
	e.mu.Lock() // a wait that is ending may look at the segment
	e.segment.release()
	e.mu.Unlock()
	_ = host.Deallocate(e.control.memory)
	for _, o := range e.free {
		_ = host.Deallocate(o.vectors)
	}
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		var err error
		if e.inner != e.pub {
			err = e.freeHandle(e.inner)
		}
		done <- errors.Join(err, e.freeHandle(e.pub))
	}()
	select {
	case err := <-done:
		if err != nil {
			slog.Warn("mpi: communicator not freed", "rank", e.rank, "cause", err)
		}
	case <-ctx.Done():
		err := fmt.Errorf("MPI_Comm_free has not returned: %w", comm.ContextError(ctx))
		slog.Warn("mpi: communicator not freed", "rank", e.rank, "cause", err)
		e.state.failed.CompareAndSwap(nil, &err)
		e.lib.turn.leave()
	}
}

// freeHandle calls MPI_Comm_free with the address of the handle.
func (e *endpoint) freeHandle(handle uintptr) error {
	if handle == e.lib.handles.world {
		return nil
	}
	cell := newCells()
	defer cell.free()
	cell.set(0, handle)
	return e.lib.must(e.lib.CommFree, cell.at(0))
}

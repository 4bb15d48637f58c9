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

// closeTimeout bounds how long Close waits for pending operations.
const closeTimeout = 5 * time.Second

// close waits for pending operations, no longer than ctx and closeTimeout, and
// leaves. It returns why operations are left pending, also if that was found before.
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
		receiving := e.settle(bounded)
		e.mu.Lock()
		pending := e.started() + len(e.waiting)
		e.mu.Unlock()
		slog.Warn("mpi: communicator closed with operations pending", "rank", e.rank, "operations", pending, "receiving", receiving, "cause", broken)
		return broken
	}
	e.mu.Lock()
	e.tellAll(note{kind: farewell})
	e.leaving.Store(true)
	e.mu.Unlock()
	e.state.progress.seeOff(ctx)
	e.state.progress.notify() // later farewells are its to read
	return nil
}

// settle has MPI write no more where a broken endpoint receives: messages that have not
// begun to come are received no more, the others are waited for until ctx ends. It
// returns how many are still coming.
func (e *endpoint) settle(ctx context.Context) (receiving int) {
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

// departs reports whether an endpoint that is leaving is left alone: the farewells
// of all other ranks have come, so that nobody sends to it any more and what it
// holds can be freed, or it broke, and nothing is.
func (e *endpoint) departs() (gone, free bool) {
	if !e.leaving.Load() {
		return false, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	broken := e.deliverNotes() != nil || e.readNotes() != nil
	for src := range e.peers {
		broken = broken || e.gaveUp(src) != nil
	}
	switch {
	case !e.leaving.Load():
		return false, false
	case !broken && !e.interop() && (e.notes.left < e.size-1 || len(e.notes.table.list) > 0):
		return false, false
	}
	e.leaving.Store(false)
	return true, !broken
}

// missing returns the ranks whose farewells an endpoint that is leaving waits for.
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

// forget takes an endpoint off those that are open.
func (s *state) forget(e *endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.splits = slices.DeleteFunc(s.splits, func(other *endpoint) bool { return other == e })
}

// descendants returns the open endpoints that were split off e, and off those.
func (s *state) descendants(e *endpoint) []*endpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []*endpoint
	for _, d := range s.splits {
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
	e.settle(ctx)
}

// release frees the memory and the MPI communicators of one that has departed. The
// standard calls MPI_Comm_free collective, but has it implemented locally; a
// library that waits for the others is waited for no longer than ctx and closeTimeout,
// and MPI_Finalize is left out then. The caller holds no lock.
func (e *endpoint) release(ctx context.Context) {
	e.table.release()
	e.scratch.release()
	e.heads.release()
	e.notes.table.release()
	e.mu.Lock() // a wait that is ending may look at the board
	e.board.release()
	e.mu.Unlock()
	_ = host.Deallocate(e.notes.memory)
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
		err := fmt.Errorf("MPI_Comm_free has not come back: %w", comm.ContextError(ctx))
		slog.Warn("mpi: communicator not freed", "rank", e.rank, "cause", err)
		e.state.failed.CompareAndSwap(nil, &err)
		e.lib.turn.leave()
	}
}

// freeHandle calls MPI_Comm_free, which wants the address of the handle.
func (e *endpoint) freeHandle(handle uintptr) error {
	if handle == e.lib.handles.world {
		return nil
	}
	cell := newCells()
	defer cell.free()
	cell.set(0, handle)
	return e.lib.must(e.lib.CommFree, cell.at(0))
}

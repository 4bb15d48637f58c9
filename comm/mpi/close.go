package mpi

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"
)

// closeTimeout bounds how long Close waits for pending operations.
const closeTimeout = 5 * time.Second

// close waits for pending operations, frees what can be freed, and leaves. It
// returns why operations are left pending, also if that was found before.
func (e *endpoint) close() error {
	e.mu.Lock()
	closed, broken := e.closed, e.broken
	e.closed = true
	e.mu.Unlock()
	if closed {
		return broken
	}
	if !e.world {
		s := e.state
		s.mu.Lock()
		s.splits = slices.DeleteFunc(s.splits, func(other *endpoint) bool { return other == e })
		s.mu.Unlock()
	}
	if broken == nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		broken = e.wait(ctx, "close")
	}
	e.state.progress.remove(e)
	if broken != nil {
		e.mu.Lock()
		pending := len(e.active) + len(e.waiting)
		e.mu.Unlock()
		slog.Warn("mpi: communicator closed with operations pending", "rank", e.rank, "operations", pending, "cause", broken)
		return broken
	}
	return e.release()
}

// release frees the memory and the MPI communicators of an idle communicator.
// The standard calls MPI_Comm_free collective, but has it implemented locally;
// a library that waits for the others is not waited for.
func (e *endpoint) release() error {
	e.table.release()
	e.scratch.release()
	for _, o := range e.free {
		_ = host.Deallocate(o.vectors)
	}
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
		return err
	case <-time.After(closeTimeout):
		slog.Warn("mpi: MPI_Comm_free did not come back", "rank", e.rank)
		return nil
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
	return e.lib.must("MPI_Comm_free", e.lib.CommFree, cell.at(0))
}

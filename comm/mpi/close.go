package mpi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// Abort implements [backend.Backend]. With interop the other ranks are not notified. What is
// being sent, and native collectives, stay in flight.
func (e *endpoint) Abort(ctx context.Context, cause error) {
	e.mu.Lock()
	e.notifyFailure(cause)
	e.mu.Unlock()
	e.drainReceives(ctx)
}

// Release implements [backend.Backend]. An endpoint that has aborted is not freed, as
// operations stay in flight. Others are freed when all ranks have released theirs.
func (e *endpoint) Release(ctx context.Context) error {
	if cause := e.life.Cause(); cause != nil {
		e.state.progress.remove(e)
		if receiving := e.drainReceives(ctx); receiving > 0 {
			slog.Warn("mpi: MPI still writes to memory of a closed communicator", "rank", e.rank, "receives", receiving, "cause", cause)
		}
		return nil
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
		receiving = e.table.cancel(e.lib, !e.canceled)
		e.canceled = true
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
	if !e.leaving.Load() { // another goroutine releases it
		return false, false
	}
	broken := e.progressControl() != nil || e.receiveControl() != nil
	for src := range e.peers {
		broken = broken || e.aborted(src) != nil
	}
	if !broken && !e.interop() && (e.control.departed < e.size-1 || len(e.control.table.list) > 0) {
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

// release frees the memory and the MPI communicators of an endpoint that has departed. The
// standard calls MPI_Comm_free collective, and recommends a local implementation. A library
// that waits for other ranks gets until ctx or [backend.HostTimeout], after which MPI_Finalize
// is left out. The caller holds no lock.
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
	ctx, cancel := context.WithTimeout(ctx, backend.HostTimeout)
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

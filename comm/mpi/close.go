package mpi

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/leak"
	"github.com/tutti-go/tutti/internal/segment"
)

// Release implements [backend.Backend]. An endpoint that has aborted is not freed, as
// operations stay in flight. Others are freed when all ranks have released theirs.
func (e *endpoint) Release(ctx context.Context) error {
	e.leakAlarm.Stop()
	if !e.Leave(ctx) {
		e.state.progress.remove(e)
		return nil
	}
	e.state.progress.releaseDeparted(ctx)
	e.state.progress.notify() // for later goodbyes
	return nil
}

// leaked runs when a communicator was garbage collected without Close. It stays open, as its last call may be waiting.
func (e *endpoint) leaked(mark *leak.Mark) {
	e.lost.Store(true)
	mark.Report()
}

// forgotten returns how many sub-communicators nobody has closed, without those that were found to be garbage.
func (s *state) forgotten() (open int) {
	for _, e := range s.progress.all() {
		if e != s.world.e && !e.Life.Closed() && !e.lost.Load() {
			open++
		}
	}
	return open
}

// release frees the memory and the MPI communicator of an endpoint that has departed. The
// standard calls MPI_Comm_free collective, and recommends a local implementation. A library
// that waits for other ranks gets until ctx or [backend.HostTimeout], after which MPI_Finalize
// is left out. The caller holds no lock.
func (e *endpoint) release(ctx context.Context) {
	e.Engine.Release()
	_ = host.Deallocate(e.buffers)
	if e.users != nil {
		e.users.release()
	}
	if e.shared != nil {
		segment.Unmap(e.shared)
	}
	ctx, cancel := context.WithTimeout(ctx, backend.HostTimeout)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- e.freeHandle() }()
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
func (e *endpoint) freeHandle() error {
	cell := newCells()
	defer cell.free()
	cell.set(0, e.handle)
	return e.lib.must(e.lib.CommFree, cell.addr(0))
}

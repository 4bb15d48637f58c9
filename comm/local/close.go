package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// closeLimit is how long Close waits for pending work. Tests wait less.
var closeLimit = 5 * time.Second

// close finishes what is pending, within a bounded time, and leaves.
func (e *endpoint) close() error {
	e.mu.Lock() // a submission comes before, and is waited for, or is refused
	closed := e.closed.Swap(true)
	e.mu.Unlock()
	if closed {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	known := e.told.Load()
	err := e.wait(ctx)
	e.depart()
	if err == nil || known {
		return nil
	}
	err = e.check.Fail("close", err)
	slog.Warn("communicator closed with unfinished operations", "error", err)
	return err
}

// depart takes the rank out of the world.
func (e *endpoint) depart() {
	e.leakAlarm.Stop()
	e.closed.Store(true)
	if !e.gone.CompareAndSwap(false, true) {
		return
	}
	e.world.left.Add(1)
	e.world.checkLeft()
	e.world.checkMailboxes()
	if e.root != e {
		e.root.forget(e)
	}
}

func (e *endpoint) remember(child *endpoint) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.children = append(e.children, child)
}

func (e *endpoint) forget(child *endpoint) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if i := slices.Index(e.children, child); i >= 0 {
		e.children = slices.Delete(e.children, i, i+1)
	}
}

// leaked runs when a communicator was garbage collected without Close.
func (e *endpoint) leaked() {
	slog.Warn("communicator was never closed", "backend", name, "rank", e.rank, "ranks", e.world.size)
	e.depart()
}

// abort takes a rank that failed out of its world, and out of those split from
// it, which break.
func (e *endpoint) abort(err error) {
	for _, child := range e.takeChildren() {
		child.abort(err)
	}
	e.told.Store(true)
	e.world.fail(&failure{
		rank:  e.rank,
		own:   err,
		peers: fmt.Errorf("%w: rank %d: %w", comm.ErrPeerFailed, e.rank, err),
	})
	e.quiesce()
	e.depart()
}

// closeAll closes the communicator and those split off below it.
func (e *endpoint) closeAll() error {
	var errs []error
	for _, child := range e.takeChildren() {
		errs = append(errs, child.closeAll())
	}
	return errors.Join(append(errs, e.close())...)
}

func (e *endpoint) takeChildren() []*endpoint {
	e.mu.Lock()
	defer e.mu.Unlock()
	children := e.children
	e.children = nil
	return children
}

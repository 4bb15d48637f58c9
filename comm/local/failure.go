package local

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// everyone is the rank of a failure that concerns all ranks alike.
const everyone = -1

// fail breaks the world, unless it is broken.
func (w *world) fail(f *failure) {
	if !w.failure.CompareAndSwap(nil, f) {
		return
	}
	w.wakeAll()
}

// checkLeft breaks the world if a rank needs one that has left: it submitted
// a collective that the other never will.
func (w *world) checkLeft() {
	for _, gone := range w.ranks {
		if !gone.gone.Load() {
			continue
		}
		for _, e := range w.ranks {
			if e.arrivals.Load() > gone.arrivals.Load() {
				w.failLeft(gone)
				return
			}
		}
	}
}

// failLeft breaks the world since somebody needs a rank that has left.
func (w *world) failLeft(gone *endpoint) {
	w.fail(&failure{
		rank:  gone.rank,
		own:   comm.ErrClosed,
		peers: fmt.Errorf("%w: rank %d closed its communicator", comm.ErrPeerFailed, gone.rank),
	})
}

// checkMailboxes breaks the world if a message waits for a rank that has left.
func (w *world) checkMailboxes() {
	for r := range w.boxes {
		box := &w.boxes[r]
		var gone *endpoint
		box.mu.Lock()
		for _, o := range box.waiting {
			if peer := w.ranks[o.peer]; peer.gone.Load() {
				gone = peer
			}
		}
		box.mu.Unlock()
		if gone != nil {
			w.failLeft(gone)
		}
	}
}

// broken is the error of a call that comes after the world broke.
func (e *endpoint) broken(f *failure) error {
	e.told.Store(true)
	if f.rank == e.rank {
		return fmt.Errorf("%w: %w", comm.ErrBroken, f.own)
	}
	return fmt.Errorf("%w: %w", comm.ErrBroken, f.peers)
}

// failed is the error of a wait during which the world broke.
func (e *endpoint) failed(f *failure) error {
	if f.rank == e.rank || f.rank == everyone {
		if e.told.CompareAndSwap(false, true) {
			return f.own
		}
	}
	return e.broken(f)
}

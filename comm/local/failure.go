package local

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// everyone is the rank of a failure that concerns all ranks alike.
const everyone = -1

// fail aborts the communicators of all ranks, unless they are.
func (w *world) fail(f *failure) {
	if !w.failure.CompareAndSwap(nil, f) {
		return
	}
	for _, e := range w.ranks {
		e.life.Fail(f.errorFor(e))
	}
	w.wakeAll()
}

// abort is fail because of a rank, whose wait returns culprit.
func (w *world) abort(e *endpoint, culprit, cause error) {
	w.fail(&failure{
		rank:    e.rank,
		culprit: culprit,
		peers:   fmt.Errorf("%w: rank %d aborted: %w", comm.ErrPeerFailed, e.rank, cause),
	})
}

// errorFor is the error of a rank whose wait the failure ends.
func (f *failure) errorFor(e *endpoint) error {
	if f.rank == e.rank || f.rank == everyone {
		return f.culprit
	}
	return f.peers
}

// checkLeft aborts the world if a rank needs one that has left: it submitted
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

// failLeft aborts the world since somebody needs a rank that has left.
func (w *world) failLeft(gone *endpoint) {
	w.fail(&failure{
		rank:    gone.rank,
		culprit: comm.ErrClosed,
		peers:   fmt.Errorf("%w: rank %d closed its communicator", comm.ErrPeerFailed, gone.rank),
	})
}

// checkMailboxes aborts the world if a message waits for a rank that has left.
func (w *world) checkMailboxes() {
	for r := range w.boxes {
		box := &w.boxes[r]
		var gone *endpoint
		box.mu.Lock()
		for o := range box.waiting.All {
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

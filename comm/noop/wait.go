package noop

import (
	"context"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// Wait implements [backend.Backend]. A Split does not wait, as there is nobody to wait
// for.
func (r *rank) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	if w.Op == comm.OpSync {
		return nil, r.finish(ctx)
	}
	if err := r.Submit(comm.Call{Op: w.Op}); err != nil { // it moves nothing, but has its place
		return nil, err
	}
	switch {
	case w.Op == comm.OpBarrier:
		return nil, r.finish(ctx)
	case w.Color < 0:
		return nil, nil
	}
	return New(r.rt), nil
}

// finish waits until messages have found their partners and copies are done.
func (r *rank) finish(ctx context.Context) error {
	for {
		r.mu.Lock()
		changed := r.unmatched()
		r.mu.Unlock()
		if err := r.life.Broken(); err != nil { // nothing is unmatched after an abort
			return err
		}
		if changed == nil {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.inFlight().Error(ctx)
		}
	}
	err := r.rt.Synchronize(ctx)
	if err != nil && ctx.Err() != nil {
		// A runtime refuses a context that has ended also when nothing is in flight.
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastLook)
		defer cancel()
		if err = r.rt.Synchronize(last); err != nil && last.Err() != nil {
			return comm.ContextError(ctx)
		}
	}
	return err
}

// lastLook is how long a wait whose context has ended looks for copies in flight. A busy host may
// take some ms to run the runtime's goroutine that finds none.
const lastLook = 50 * time.Millisecond

// inFlight describes what waits for a partner. The caller holds mu.
func (r *rank) inFlight() (f backend.InFlight) {
	for d := r.waiting.first(); d != nil; d = r.waiting.after(d) {
		if d.Op.Message() {
			f.Messages = append(f.Messages, d.Call)
		} else {
			f.Behind++
		}
	}
	return f
}

// unmatched returns a channel that is closed when something that waits is done,
// nil if nothing does. The caller holds mu.
func (r *rank) unmatched() <-chan struct{} {
	if r.waiting.first() != nil && r.changed == nil {
		r.changed = make(chan struct{})
	}
	return r.changed
}

// announce wakes waits. The caller holds mu.
func (r *rank) announce() {
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

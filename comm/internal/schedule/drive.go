package schedule

import (
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/poll"
)

// lookLimit is how long one engine keeps the others waiting in Look.
const lookLimit = 5 * time.Millisecond

// Drive lets operations go on, and hears control messages, if nobody waits. It is for wires
// that block ([Waiter]).
func (e *Engine) Drive() {
	if e.waiters.Load() > 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for moved := true; moved && e.inFlight.Load() > 0; {
		moved, _ = e.poll(false, 1) // an error aborts the communicator
	}
	e.listen()
}

// listen hears control messages. The caller holds mu.
func (e *Engine) listen() {
	if e.Life.Err() == nil {
		if err := e.attend(); err != nil {
			_ = e.fail(comm.OpSync, err)
		}
	}
}

// Look is Drive for a goroutine that looks at many engines, one every tick: over a wire that
// moves data only while it is polled. It reports whether operations are in flight that nobody
// waits for. missed says that another goroutine has the engine's lock; it may be submitting.
//
// Operations go on until nothing has moved for a tick, or lookLimit is over. Many small
// operations go on step by step, each when the other ranks have taken theirs: after one step
// the next is close if other ranks look as well, and a tick is their pause.
func (e *Engine) Look(tick time.Duration) (busy, missed bool) {
	if e.waiters.Load() > 0 {
		return false, false
	}
	if !e.mu.TryLock() {
		return false, true
	}
	var began, last time.Time
	for e.inFlight.Load() > 0 && e.waiters.Load() == 0 {
		// An error aborts the communicator, which its next call reports.
		moved, err := e.poll(false, 1)
		now := time.Now()
		if began.IsZero() {
			began = now
		}
		if moved {
			last = now
		}
		if err != nil || now.Sub(last) > tick || now.Sub(began) > lookLimit {
			break
		}
		e.mu.Unlock()
		if !moved {
			poll.Yield()
		}
		if !e.mu.TryLock() {
			return true, true
		}
	}
	e.listen()
	busy = e.Life.Broken() == nil && e.started() > 0
	e.mu.Unlock()
	return busy, false
}

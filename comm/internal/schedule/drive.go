package schedule

import (
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/poll"
)

// Drive advances operations, and receives control messages, if nobody waits. It is for wires that block ([Waiter]).
func (e *Engine) Drive() { e.drive(0, true) }

// lookLimit is how long one engine may delay the others in Look.
const lookLimit = 5 * time.Millisecond

// Look is Drive for a goroutine that polls many engines, one every tick, over a wire that moves data only while it is
// polled. It reports whether operations are in flight that nobody waits for. missed means that another goroutine holds
// the engine's lock; it may be submitting.
func (e *Engine) Look(tick time.Duration) (busy, missed bool) {
	return e.drive(tick, false)
}

// idleLooks bounds the consecutive polls without progress within a tick, for a clock that stands still while drive
// runs, as in a bubble of testing/synctest.
const idleLooks = 10_000

// drive advances operations until nothing has moved for a tick, or lookLimit is over. Many small operations advance
// step by step, each when the other ranks have taken their steps: after one step the next is close if other ranks poll
// as well, and a tick is their pause. It releases mu in between. Unless block is set, it does not wait for mu.
func (e *Engine) drive(tick time.Duration, block bool) (busy, missed bool) {
	var began, last time.Time
	idle := 0
	for e.missed.Store(true); e.waiters.Load() == 0; e.missed.Store(true) {
		if block {
			e.mu.Lock()
		} else if !e.mu.TryLock() {
			return !began.IsZero(), true
		}
		e.missed.Store(false)
		var moved bool
		var err error
		if e.inFlight.Load() > 0 {
			moved, err = e.poll(false, 1) // an error aborts the communicator, and its next call reports it
		}
		now := time.Now()
		if began.IsZero() {
			began = now
		}
		idle++
		if moved {
			last = now
			idle = 0
		}
		recent := moved || idle < idleLooks && now.Sub(last) < tick
		if err == nil && e.inFlight.Load() > 0 && recent && (block || now.Sub(began) <= lookLimit) {
			e.mu.Unlock()
			if !moved {
				poll.Yield()
			}
			continue
		}
		if e.Life.Err() == nil {
			if err := e.attend(); err != nil {
				_ = e.fail(comm.OpSync, err)
			}
		}
		busy = e.Life.Broken() == nil && e.started() > 0
		e.mu.Unlock()
		return busy, false
	}
	return false, false
}

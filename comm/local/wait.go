package local

import (
	"context"
	"runtime"

	"github.com/tutti-go/tutti/comm/backend"
)

// Progress implements [backend.Progresser].
func (e *endpoint) Progress() backend.Progress {
	// Later requests ask for more; too many submitted and too few done do no harm.
	ended := e.messages.Ended()
	begun := e.messages.Begun()
	done := min(e.completed(), e.arrivals.Load()) // others may have finished what this rank is just telling
	if e.telling() {
		done = min(done, e.arrivals.Load()-1)
	}
	return backend.Progress{
		Collectives: backend.Count{Submitted: e.submitted.Load() - begun, Done: done},
		Messages:    backend.Count{Submitted: begun, Done: ended},
	}
}

// finish waits until everything the rank submitted is done.
func (e *endpoint) finish(ctx context.Context) error {
	if e.life.Closed() {
		e.counted()
	}
	return e.wait(ctx)
}

// counted returns when a call that was accepted before is among those in flight.
func (e *endpoint) counted() {
	e.mu.Lock()
	defer e.mu.Unlock()
}

// wait helps until everything is done. If that fails, the world has failed.
func (e *endpoint) wait(ctx context.Context) error {
	w := e.world
	s := e.habit.begin()
	for {
		if e.done() {
			e.habit.learn(&s)
			return nil
		}
		if w.small > 0 && e.finishTold() {
			continue
		}
		if f := w.failure.Load(); f != nil {
			return e.failedWith(f)
		}
		if e.help(&s) {
			e.habit.learn(&s) // ranks come to a collective one after the other: a wait for its chunks is one for peers
			s = e.habit.begin()
			continue
		}
		// Ranks in step never come to sleep, where they would hear that the context has ended.
		if !s.looked && ctx.Err() != nil {
			s.stop()
			continue // to help with all chunks before
		}
		switch s.next(clock) {
		case letOthersRun:
			runtime.Gosched()
		case goToSleep:
			e.mu.Lock()
			e.judge()
			e.mu.Unlock()
			if err := e.sleep(ctx); err != nil && !e.done() {
				err = e.inFlight().Error(ctx)
				w.abort(e, err, err)
			}
			s.last = clock()
			e.habit.learn(&s)
			s = e.habit.begin()
		}
	}
}

// failedWith ends a wait in a world that has failed: with success if the call that is waited for is complete,
// as it is then on all ranks that wait in it, the one that aborted included. For a small collective nobody
// decides that: it is complete when all have told it, and a rank that was accepting the call while the world
// failed may be about to. So this waits until each rank has passed its lock; see endpoint.refusal.
func (e *endpoint) failedWith(f *failure) error {
	for _, peer := range e.world.ranks {
		peer.counted()
	}
	e.mu.Lock()
	e.finishSmall()
	e.mu.Unlock()
	e.drain()
	if e.done() {
		return nil
	}
	return f.errorFor(e)
}

// inFlight describes what keeps the rank waiting.
func (e *endpoint) inFlight() (f backend.InFlight) {
	w := e.world
	e.mu.Lock()
	defer e.mu.Unlock()
	seq := e.completed()
	x := (*entry)(nil)
	if e.telling() {
		seq = e.arrivals.Load() - 1
		x = &w.cell(seq, e.rank).entry
	} else {
		x = &w.slot(seq).calls[e.rank]
	}
	if arrived := e.arrivals.Load(); seq < arrived {
		f.Collective = x.call()
		f.Number = seq + 1
		f.Behind = int(arrived - seq - 1)
		for _, peer := range w.ranks {
			if peer.arrivals.Load() <= seq {
				f.Missing = append(f.Missing, peer.rank)
			}
		}
	}
	for _, o := range e.opened {
		f.Messages = append(f.Messages, o.call())
	}
	f.Behind += len(e.backlog.All())
	return f
}

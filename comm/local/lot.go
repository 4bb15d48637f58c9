package local

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// sleep waits until there may be something to do for the rank. It returns an
// error if ctx ends before.
func (e *endpoint) sleep(ctx context.Context) error {
	w := e.world
	p := w.enterLot(e)
	defer w.leaveLot(p)
	// Events before others could see that this rank sleeps. Another wait of the rank may finish its small collective
	// between the first two looks, which the second one sees.
	if e.mayFinish() || e.done() || w.failure.Load() != nil || e.mayHelp() {
		return nil
	}
	select {
	case <-p.wake:
		return nil
	case <-ctx.Done():
		return comm.ContextError(ctx)
	}
}

// mayHelp reports whether there may be work for another rank to help with.
func (e *endpoint) mayHelp() bool {
	front := &e.world.front
	return e.exhausted.Load() != uint64(front.claim.last()) || front.jobs.Load() > 0
}

func (w *world) enterLot(e *endpoint) *waiter {
	l := &w.lot
	l.mu.Lock()
	defer l.mu.Unlock()
	var p *waiter
	if last := len(l.idle) - 1; last >= 0 {
		p = l.idle[last]
		l.idle = l.idle[:last]
	} else {
		p = &waiter{wake: make(chan struct{}, 1)}
	}
	p.endpoint = e
	p.place = len(l.waiting)
	l.waiting = append(l.waiting, p)
	w.sleepers.Add(1)
	return p
}

func (w *world) leaveLot(p *waiter) {
	l := &w.lot
	l.mu.Lock()
	defer l.mu.Unlock()
	w.sleepers.Add(-1)
	last := len(l.waiting) - 1
	moved := l.waiting[last]
	l.waiting[p.place] = moved
	moved.place = p.place
	l.waiting[last] = nil
	l.waiting = l.waiting[:last]
	select {
	case <-p.wake: // came too late
	default:
	}
	l.idle = append(l.idle, p)
}

// wake wakes up to n of the sleepers that should wake, all if n is negative.
func (w *world) wake(n int, should func(*endpoint) bool) {
	if w.sleepers.Load() == 0 {
		return
	}
	w.lot.mu.Lock()
	defer w.lot.mu.Unlock()
	for _, p := range w.lot.waiting {
		if n == 0 {
			return
		}
		if !should(p.endpoint) {
			continue
		}
		n--
		select {
		case p.wake <- struct{}{}:
		default: // is being woken
		}
	}
}

func anyone(*endpoint) bool { return true }

// wakeDone wakes the ranks whose operations are all done.
func (w *world) wakeDone() { w.wake(-1, (*endpoint).done) }

// wakeHelpers wakes as many ranks as can work on the chunks beside the caller, but at least one, as the caller may do
// something else first. Ranks that should wake wait for these chunks themselves: another rank might find that it has
// nothing to wait for any more, and leave without helping.
func (w *world) wakeHelpers(chunks int, should func(*endpoint) bool) {
	w.wake(max(min(chunks, w.workers)-1, 1), should)
}

// wakeAll wakes all sleepers.
func (w *world) wakeAll() { w.wake(-1, anyone) }

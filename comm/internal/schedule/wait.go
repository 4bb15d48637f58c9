package schedule

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/poll"
)

// wait waits until nothing is in flight, or ctx ends. op is the call that waits.
func (e *Engine) wait(ctx context.Context, op comm.Op) error {
	e.waiters.Add(1)
	defer e.waited()
	var p poll.Pace
	for {
		if idle, err := e.drain(&p, op); err != nil || idle {
			return err
		}
		// The context comes after the first tries, so that it costs nothing where the
		// peers are there.
		if ctx.Err() != nil {
			return e.expire(ctx, op)
		}
		e.pause(&p)
	}
}

// waited ends a wait. Drive has left what came meanwhile to it, perhaps the last word of a rank when there was
// nothing more to wait for.
func (e *Engine) waited() {
	if e.waiters.Add(-1) == 0 && e.waiter != nil && (e.missed.Load() || e.inFlight.Load() > 0) {
		e.Drive()
	}
}

// pause pauses between two looks.
func (e *Engine) pause(p *poll.Pace) {
	switch {
	case e.looker != nil && e.looker.Moved():
		*p = poll.Pace{} // a part of a message has come, and the next one is as close as the first was
	case e.waiter == nil, e.looker != nil && e.looker.Looks(p.Stalled()):
		p.Next()
	default:
		e.waiter.Await(p.Block())
	}
}

// drain polls a few times and reports whether nothing is in flight.
func (e *Engine) drain(p *poll.Pace, op comm.Op) (idle bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for moved, tries := true, p.Polls(); moved && tries > 0 && e.inFlight.Load() > 0; tries-- {
		if moved, err = e.poll(p.Stalled(), tries); err != nil {
			return false, err
		}
	}
	if idle = e.inFlight.Load() == 0; idle || !p.Stalled() {
		return idle, nil
	}
	if p.Long() {
		e.reportStall()
	}
	if err := e.attend(); err != nil {
		return false, e.fail(op, err)
	}
	return false, nil
}

// expire ends a wait whose context has ended.
func (e *Engine) expire(ctx context.Context, op comm.Op) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.attend()
	if err == nil {
		err = e.describe().Error(ctx)
	}
	return e.fail(op, err)
}

package mpi

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// wait waits until nothing is in flight, or ctx ends. op is the call that waits.
func (e *endpoint) wait(ctx context.Context, op comm.Op) error {
	e.waiters.Add(1)
	defer e.waiters.Add(-1)
	var p pause
	for {
		if idle, err := e.drain(&p, op); err != nil || idle {
			return err
		}
		// The context comes after the first tries, so that it costs nothing where the
		// peers are there.
		if ctx.Err() != nil {
			return e.expire(ctx, op)
		}
		p.next()
	}
}

// drain polls a few times and reports whether nothing is in flight.
func (e *endpoint) drain(p *pause, op comm.Op) (idle bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for tries := p.polls(); tries > 0; tries-- {
		if e.idle() {
			return true, nil
		}
		moved, err := e.poll(p.stalled(), tries)
		if err != nil {
			return false, err
		}
		if !moved {
			break
		}
	}
	if e.idle() {
		return true, nil
	}
	if !p.stalled() {
		return false, nil
	}
	if p.long() {
		e.reportStall()
	}
	if err := e.attend(); err != nil {
		return false, e.fail(op, err)
	}
	return false, nil
}

// expire ends a wait whose context has ended.
func (e *endpoint) expire(ctx context.Context, op comm.Op) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.attend()
	if err == nil {
		err = e.describe().Error(ctx)
	}
	return e.fail(op, err)
}

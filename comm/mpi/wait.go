package mpi

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// sync waits until nothing is in flight, or ctx ends. name is that of the call that waits.
func (e *endpoint) sync(ctx context.Context, name string) error {
	return e.wait(ctx, name, false)
}

// wait is sync, also of an endpoint that close has marked closed.
func (e *endpoint) wait(ctx context.Context, name string, closing bool) error {
	e.waiters.Add(1)
	defer e.waiters.Add(-1)
	var p pause
	for {
		if idle, err := e.drain(&p, name, closing); err != nil || idle {
			return err
		}
		// The context comes after the first tries, so that it costs nothing where the
		// peers are there.
		if ctx.Err() != nil {
			return e.expire(ctx, name)
		}
		p.next()
	}
}

// drain polls a few times and reports whether nothing is in flight.
func (e *endpoint) drain(p *pause, name string, closing bool) (idle bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p.first() && !closing {
		if err := e.usable(); err != nil {
			return false, err
		}
	}
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
		return false, e.fail(name, err)
	}
	return false, nil
}

// expire ends a wait whose context has ended.
func (e *endpoint) expire(ctx context.Context, name string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.attend()
	if err == nil {
		err = fmt.Errorf("%w, waiting for %s", comm.ContextError(ctx), e.waitsFor())
	}
	return e.fail(name, err)
}

// Package noop is the communicator of a single rank: what a program that is
// written for many ranks uses when it runs alone.
//
// It keeps the whole contract of [comm.Communicator]. A collective whose
// buffers differ copies, by means of the [runtime.Runtime] that owns the
// memory, so it works on a GPU as well; one in place costs only the checks. A
// message to oneself is copied when both its ends are there, in whichever
// order they come.
package noop

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

const backend = "noop"

// communicator is a world of one.
type communicator struct {
	comm.Calls
	rt    runtime.Runtime
	check comm.Check

	mu      sync.Mutex
	waiting []comm.Call   // messages without a partner, and what comes after them
	changed chan struct{} // closed when something waiting was done; nil if nobody waits
	closed  bool
	broken  error // what broke the communicator
}

// New returns a communicator of one rank for memory of rt.
func New(rt runtime.Runtime) comm.Communicator {
	c := &communicator{rt: rt, check: comm.Check{Backend: backend, WorldSize: 1}}
	c.Calls = comm.NewCalls(&c.check, c)
	return c
}

// CheckDevice implements [comm.Reacher].
func (c *communicator) CheckDevice(d runtime.Device) error {
	if own := c.rt.Device(); d != own {
		return c.check.Unreachable(d, fmt.Sprintf("this communicator was made for %v", own))
	}
	return nil
}

// Usable implements [comm.Backend].
func (c *communicator) Usable() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.usable()
}

// usable is Usable for a caller that holds mu.
func (c *communicator) usable() error { return comm.Unusable(c.closed, c.broken) }

// Wait implements [comm.Backend]. A Split does not wait, as there is nobody to wait
// for.
func (c *communicator) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	switch {
	case w.Op != comm.OpSplit:
		return nil, c.finish(ctx)
	case w.Color < 0:
		return nil, c.Usable()
	}
	return New(c.rt), c.Usable()
}

// finish waits until messages have found their partners and copies are done.
func (c *communicator) finish(ctx context.Context) error {
	for {
		c.mu.Lock()
		if err := c.usable(); err != nil {
			c.mu.Unlock()
			return err
		}
		if len(c.waiting) == 0 {
			c.mu.Unlock()
			break
		}
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed := c.changed
		c.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return c.interrupt(ctx)
		}
	}
	err := c.rt.Synchronize(ctx)
	if err != nil && ctx.Err() != nil {
		return c.interrupt(ctx)
	}
	return err
}

// interrupt breaks the communicator because ctx is done.
func (c *communicator) interrupt(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fail(comm.ContextError(ctx))
}

// fail breaks the communicator and returns err; the first cause stays. The caller
// holds mu.
func (c *communicator) fail(err error) error {
	if c.broken == nil {
		c.broken = err
	}
	c.waiting = nil
	c.announce()
	return err
}

// announce wakes those who wait in Sync. The caller holds mu.
func (c *communicator) announce() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// closeTimeout bounds how long Close waits for the device.
const closeTimeout = 5 * time.Second

// Close implements [comm.Communicator].
func (c *communicator) Close() error {
	c.mu.Lock()
	closed, unmatched := c.closed, len(c.waiting)
	c.closed, c.waiting = true, nil
	c.announce()
	c.mu.Unlock()
	if closed {
		return nil
	}
	if unmatched > 0 {
		slog.Warn("communicator closed with messages that nobody received", "backend", backend, "operations", unmatched)
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if err := c.rt.Synchronize(ctx); err != nil && !errors.Is(err, runtime.ErrClosed) {
		slog.Warn("communicator closed with copies under way", "backend", backend, "error", err)
	}
	return nil
}

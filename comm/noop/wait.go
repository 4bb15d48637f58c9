package noop

import (
	"cmp"
	"context"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// Wait implements [backend.Backend]. A Split does not wait, as there is nobody to wait
// for.
func (c *communicator) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	if w.Op == comm.OpSync {
		return nil, c.finish(ctx)
	}
	if err := c.Submit(comm.Call{Op: w.Op}); err != nil { // it moves nothing, but has its place
		return nil, err
	}
	switch {
	case w.Op == comm.OpBarrier:
		return nil, c.finish(ctx)
	case w.Color < 0:
		return nil, nil
	}
	return New(c.rt), nil
}

// finish waits until messages have found their partners and copies are done.
func (c *communicator) finish(ctx context.Context) error {
	for {
		c.mu.Lock()
		changed, err := c.outstanding(), c.usable()
		c.mu.Unlock()
		if err != nil {
			return err
		}
		if changed == nil {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return c.interrupt(ctx)
		}
	}
	err := c.rt.Synchronize(ctx)
	if err != nil && ctx.Err() != nil {
		// A runtime refuses a context that has ended also when nothing is pending.
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastLook)
		defer cancel()
		if err = c.rt.Synchronize(last); err != nil && last.Err() != nil {
			return c.interrupt(ctx)
		}
	}
	return err
}

// lastLook is how long a wait whose context has ended looks for copies under way.
const lastLook = time.Millisecond

// interrupt breaks the communicator because ctx is done.
func (c *communicator) interrupt(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fail(comm.ContextError(ctx))
}

// fail breaks the communicator and returns err; the first cause stays. The caller
// holds mu.
func (c *communicator) fail(err error) error {
	c.broken = cmp.Or(c.broken, err)
	c.waiting = nil
	c.announce()
	return err
}

// outstanding returns a channel that is closed when something that waits is done,
// nil if nothing does. The caller holds mu.
func (c *communicator) outstanding() <-chan struct{} {
	if len(c.waiting) > 0 && c.changed == nil {
		c.changed = make(chan struct{})
	}
	return c.changed
}

// announce wakes those who wait in Sync. The caller holds mu.
func (c *communicator) announce() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

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
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/runtime"
)

const name = "noop"

// communicator is a world of one.
type communicator struct {
	backend.Calls
	rt    runtime.Runtime
	check backend.Check

	mu      sync.Mutex
	waiting []comm.Call   // messages without a partner, and what comes after them
	calls   comm.Progress // Done is up to when nothing was waiting
	changed chan struct{} // closed when something waiting was done; nil if nobody waits
	closed  bool
	broken  error // what broke the communicator
}

// New returns a communicator of one rank for memory of rt.
func New(rt runtime.Runtime) comm.Communicator {
	c := &communicator{rt: rt, check: backend.Check{Backend: name, WorldSize: 1}}
	c.Calls = backend.NewCalls(&c.check, c)
	return c
}

// Progress implements [comm.Progresser]. What a device copies is not known to be done.
func (c *communicator) Progress() comm.Progress {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rt.Device().Kind != runtime.CPU {
		return comm.Progress{}
	}
	return c.calls
}

// CheckDevice implements [comm.Reacher].
func (c *communicator) CheckDevice(d runtime.Device) error {
	if own := c.rt.Device(); d != own {
		return c.check.Unreachable(d, fmt.Sprintf("this communicator was made for %v", own))
	}
	return nil
}

// Usable implements [backend.Backend].
func (c *communicator) Usable() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.usable()
}

// usable is Usable for a caller that holds mu.
func (c *communicator) usable() error { return backend.Unusable(c.closed, c.broken) }

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
		slog.Warn("communicator closed with messages that nobody received", "backend", name, "operations", unmatched)
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if err := c.rt.Synchronize(ctx); err != nil && !errors.Is(err, runtime.ErrClosed) {
		slog.Warn("communicator closed with copies under way", "backend", name, "error", err)
	}
	return nil
}

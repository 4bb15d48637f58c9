package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// world is what the ranks share: whoever brings the last missing call does the
// work, under one lock. That is slow, but every promise of the contract can be
// seen in it.
type world struct {
	mu      sync.Mutex
	ranks   []*Communicator
	memory  *cpu.Runtime  // to copy and reduce; all buffers are host memory
	changed chan struct{} // closed and replaced when something was done
	failure error         // why the world is broken
}

// Communicator is one rank. comm.Calls has the methods that move data: they
// check their arguments and come to Submit or SubmitTogether.
type Communicator struct {
	comm.Calls
	world *world
	check comm.Check

	// The world's lock guards what follows. queue holds what was submitted and is
	// not done, one group after the other.
	queue  [][]*pending
	closed bool
}

// pending is a call that is not done, or a Split.
type pending struct {
	comm.Call
	done       bool
	color, key int
	child      *Communicator
}

var _ comm.Communicator = (*Communicator)(nil)

// newWorld makes a world of n ranks.
func newWorld(n int, memory *cpu.Runtime) *world {
	w := &world{memory: memory, changed: make(chan struct{})}
	for r := range n {
		c := &Communicator{world: w, check: comm.Check{Backend: "custom", Rank: r, WorldSize: n}}
		c.Calls = comm.NewCalls(&c.check, c)
		w.ranks = append(w.ranks, c)
	}
	return w
}

// communicators makes a world of n ranks and returns their communicators.
func communicators(n int, memory *cpu.Runtime) []comm.Communicator {
	var all []comm.Communicator
	for _, c := range newWorld(n, memory).ranks {
		all = append(all, c)
	}
	return all
}

// Usable implements [comm.Backend].
func (c *Communicator) Usable() error {
	c.world.mu.Lock()
	defer c.world.mu.Unlock()
	return c.usable()
}

func (c *Communicator) usable() error {
	switch {
	case c.closed:
		return comm.ErrClosed
	case c.world.failure != nil:
		return fmt.Errorf("%w: %w", comm.ErrBroken, c.world.failure)
	}
	return nil
}

// Submit implements [comm.Backend].
func (c *Communicator) Submit(call comm.Call) error { return c.SubmitTogether([]comm.Call{call}) }

// SubmitTogether implements [comm.Backend].
func (c *Communicator) SubmitTogether(calls []comm.Call) error {
	var group []*pending
	for _, call := range calls {
		call.SendCounts, call.SendDispls = slices.Clone(call.SendCounts), slices.Clone(call.SendDispls)
		call.RecvCounts, call.RecvDispls = slices.Clone(call.RecvCounts), slices.Clone(call.RecvDispls)
		group = append(group, &pending{Call: call})
	}
	return c.enqueue(group...)
}

func (c *Communicator) enqueue(group ...*pending) error {
	c.world.mu.Lock()
	defer c.world.mu.Unlock()
	if err := c.usable(); err != nil {
		return err
	}
	c.queue = append(c.queue, group)
	c.world.progress()
	return nil
}

// Sync implements [comm.Communicator].
func (c *Communicator) Sync(ctx context.Context) error { return c.finish(ctx, comm.OpSync) }

// Barrier implements [comm.Communicator].
func (c *Communicator) Barrier(ctx context.Context) error {
	return c.finish(ctx, comm.OpBarrier, &pending{Call: comm.Call{Op: comm.OpBarrier}})
}

// Split implements [comm.Communicator].
func (c *Communicator) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	p := &pending{Call: comm.Call{Op: comm.OpSplit}, color: color, key: key}
	if err := c.finish(ctx, comm.OpSplit, p); err != nil || p.child == nil {
		return nil, err
	}
	return p.child, nil
}

// finish submits what it is given and waits until everything is done.
func (c *Communicator) finish(ctx context.Context, op comm.Op, group ...*pending) error {
	err := c.enqueue(group...)
	if err == nil {
		err = c.world.wait(ctx, func() bool { return len(c.queue) == 0 })
	}
	if err != nil {
		return c.check.Fail(op.String(), err)
	}
	return nil
}

// patience is how long Close waits for operations that are under way.
const patience = time.Second

// Close implements [comm.Communicator].
func (c *Communicator) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := c.world.wait(ctx, func() bool { return c.closed || len(c.queue) == 0 }); err != nil {
		slog.Warn("communicator closed with operations under way", "rank", c.Rank(), "error", err)
	}
	c.world.mu.Lock()
	defer c.world.mu.Unlock()
	c.closed = true
	c.world.progress()
	return nil
}

// wait waits until ready reports true, the world breaks, or ctx is done.
func (w *world) wait(ctx context.Context, ready func() bool) error {
	for {
		w.mu.Lock()
		changed, failure, done := w.changed, w.failure, ready()
		w.mu.Unlock()
		switch {
		case done:
			return nil
		case failure != nil:
			return failure
		}
		select {
		case <-changed:
		case <-ctx.Done():
			err := comm.ContextError(ctx)
			w.mu.Lock()
			w.fail(fmt.Errorf("%w: %w", comm.ErrPeerFailed, err))
			w.mu.Unlock()
			return err
		}
	}
}

// fail breaks the world, unless it is broken or there is no error.
func (w *world) fail(err error) {
	if err != nil && w.failure == nil {
		w.failure = err
		w.announce()
	}
}

func (w *world) announce() {
	close(w.changed)
	w.changed = make(chan struct{})
}

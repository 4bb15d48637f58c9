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
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

const backend = "noop"

// communicator is a world of one.
type communicator struct {
	rt    runtime.Runtime
	check comm.Check
	group comm.Grouping

	mu      sync.Mutex
	held    []operation   // submitted in the open group
	waiting []operation   // messages without a partner, and what comes after them
	changed chan struct{} // closed when something waiting was done; nil if nobody waits
	closed  bool
	broken  error // what broke the communicator
}

// New returns a communicator of one rank for memory of rt.
func New(rt runtime.Runtime) comm.Communicator {
	return &communicator{rt: rt, check: comm.Check{Backend: backend, WorldSize: 1}}
}

// CheckDevice implements [comm.Reacher].
func (c *communicator) CheckDevice(d runtime.Device) error {
	if own := c.rt.Device(); d != own {
		return c.check.Fail("check device", fmt.Errorf("%w: memory of %v, but this communicator was made for %v", comm.ErrDevice, d, own))
	}
	return nil
}

// Rank implements [comm.Communicator].
func (c *communicator) Rank() int { return 0 }

// WorldSize implements [comm.Communicator].
func (c *communicator) WorldSize() int { return 1 }

// AllReduce implements [comm.Communicator].
func (c *communicator) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	return c.reduce("allreduce", send, recv, count, dt, c.check.AllReduce(send, recv, count, dt, op))
}

// Broadcast implements [comm.Communicator].
func (c *communicator) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	return c.copy("broadcast", buf, buf, count, dt, c.check.Broadcast(buf, count, dt, root))
}

// Reduce implements [comm.Communicator].
func (c *communicator) Reduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp, root int) error {
	return c.reduce("reduce", send, recv, count, dt, c.check.Reduce(send, recv, count, dt, op, root))
}

// AllGather implements [comm.Communicator].
func (c *communicator) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	return c.copy("allgather", send, recv, count, dt, c.check.AllGather(send, recv, count, dt))
}

// AllGatherV implements [comm.Communicator].
func (c *communicator) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	const name = "allgatherv"
	if err := c.check.AllGatherV(send, recv, counts, displs, dt); err != nil {
		return c.group.Refuse(err)
	}
	return c.copy(name, send, recv+uintptr(displs[0]*dt.Size()), counts[0], dt, nil)
}

// ReduceScatter implements [comm.Communicator].
func (c *communicator) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	return c.reduce("reducescatter", send, recv, count, dt, c.check.ReduceScatter(send, recv, count, dt, op))
}

// AllToAll implements [comm.Communicator].
func (c *communicator) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	return c.copy("alltoall", send, recv, count, dt, c.check.AllToAll(send, recv, count, dt))
}

// AllToAllV implements [comm.Communicator].
func (c *communicator) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	const name = "alltoallv"
	if err := c.check.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt); err != nil {
		return c.group.Refuse(err)
	}
	size := dt.Size()
	return c.copy(name, send+uintptr(sendDispls[0]*size), recv+uintptr(recvDispls[0]*size), sendCounts[0], dt, nil)
}

// Gather implements [comm.Communicator].
func (c *communicator) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return c.copy("gather", send, recv, count, dt, c.check.Gather(send, recv, count, dt, root))
}

// Scatter implements [comm.Communicator].
func (c *communicator) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return c.copy("scatter", send, recv, count, dt, c.check.Scatter(send, recv, count, dt, root))
}

// Send implements [comm.Communicator].
func (c *communicator) Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
	return c.submit(operation{kind: send, src: buf, count: count, dt: dt, tag: tag}, c.check.Send(buf, count, dt, dest))
}

// Recv implements [comm.Communicator].
func (c *communicator) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	return c.submit(operation{kind: recv, dst: buf, count: count, dt: dt, tag: tag}, c.check.Recv(buf, count, dt, src))
}

// reduce submits what is left of a reduction when there is one rank.
func (c *communicator) reduce(name string, src, dst uintptr, count int, dt dtype.DType, err error) error {
	return c.submit(operation{kind: collective, name: name, src: src, dst: dst, count: count, dt: dt, truth: dt == dtype.Bool}, err)
}

// copy submits what is left of any other collective.
func (c *communicator) copy(name string, src, dst uintptr, count int, dt dtype.DType, err error) error {
	return c.submit(operation{kind: collective, name: name, src: src, dst: dst, count: count, dt: dt}, err)
}

// Group implements [comm.Communicator].
func (c *communicator) Group(submit func() error) error {
	if err := c.usable("group"); err != nil {
		return c.group.Refuse(err)
	}
	return c.group.Run(submit, func(err error) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		held := c.held
		c.held = c.held[:0]
		if err != nil || len(held) == 0 {
			return nil
		}
		if err := c.usableLocked("group"); err != nil {
			return err
		}
		// The operations of a group are not ordered among themselves. Messages
		// go first, lest a collective waits behind one whose partner comes
		// after it.
		for _, messages := range []bool{true, false} {
			for _, op := range held {
				if op.isMessage() == messages {
					c.waiting = append(c.waiting, op)
				}
			}
		}
		return c.progress()
	})
}

// usable returns why nothing can be submitted, or nil.
func (c *communicator) usable(name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.usableLocked(name)
}

func (c *communicator) usableLocked(name string) error {
	switch {
	case c.closed:
		return c.check.Fail(name, comm.ErrClosed)
	case c.broken != nil:
		return c.check.Fail(name, fmt.Errorf("%w: %w", comm.ErrBroken, c.broken))
	}
	return nil
}

// Sync implements [comm.Communicator].
func (c *communicator) Sync(ctx context.Context) error { return c.finish(ctx, "sync") }

// Barrier implements [comm.Communicator].
func (c *communicator) Barrier(ctx context.Context) error { return c.finish(ctx, "barrier") }

// finish waits until messages have found their partners and copies are done.
func (c *communicator) finish(ctx context.Context, name string) error {
	if err := c.group.Outside(); err != nil {
		return c.group.Refuse(c.check.Fail(name, err))
	}
	for {
		c.mu.Lock()
		if err := c.usableLocked(name); err != nil {
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
			return c.interrupt(ctx, name)
		}
	}
	if err := c.rt.Synchronize(ctx); err != nil {
		if ctx.Err() != nil {
			return c.interrupt(ctx, name)
		}
		return c.check.Fail(name, err)
	}
	return nil
}

// interrupt breaks the communicator because ctx is done.
func (c *communicator) interrupt(ctx context.Context, name string) error {
	err := comm.ContextError(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail(err)
	return c.check.Fail(name, err)
}

// fail breaks the communicator; the first cause stays. The caller holds mu.
func (c *communicator) fail(err error) {
	if c.broken == nil {
		c.broken = err
	}
	c.waiting = nil
	c.announce()
	c.group.Free()
}

// announce wakes those who wait in Sync. The caller holds mu.
func (c *communicator) announce() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// Split implements [comm.Communicator]. It does not wait, as there is nobody to
// wait for.
func (c *communicator) Split(_ context.Context, color, _ int) (comm.Communicator, error) {
	if err := c.group.Outside(); err != nil {
		return nil, c.group.Refuse(c.check.Fail("split", err))
	}
	if err := c.usable("split"); err != nil {
		return nil, err
	}
	if color < 0 {
		return nil, nil
	}
	return New(c.rt), nil
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
	c.group.Free()
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

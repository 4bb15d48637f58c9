package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

const backend = "board"

// what tells one operation from another: ranks that do not agree on it are out
// of step.
type what struct {
	call  string
	count int
	dt    dtype.DType
	op    comm.ReduceOp
	root  int // the other rank of a message
	tag   uint32
}

func (w what) String() string { return fmt.Sprintf("%s of %d %v", w.call, w.count, w.dt) }

func (w what) isMessage() bool { return w.call == "send" || w.call == "recv" }

// Communicator is one rank's place at a board.
type Communicator struct {
	board *board
	check comm.Check
	rank  int

	group comm.Grouping

	// The board's lock guards what follows. queue holds what this rank asked
	// for and is not done yet, one group after the other; held is what was
	// submitted in the group that is open.
	queue  [][]*note
	held   []*note
	closed bool
}

var _ comm.Communicator = (*Communicator)(nil)

// newWorld makes the communicators of a world of n ranks.
func newWorld(n int) []*Communicator {
	b := &board{changed: make(chan struct{})}
	for r := range n {
		b.ranks = append(b.ranks, &Communicator{
			board: b, rank: r,
			check: comm.Check{Backend: backend, Rank: r, WorldSize: n},
		})
	}
	return b.ranks
}

// front is the group that this rank is working on.
func (c *Communicator) front() []*note {
	if len(c.queue) == 0 {
		return nil
	}
	return c.queue[0]
}

// next is the first note of the front group that is not done and matches.
func (c *Communicator) next(match func(n *note) bool) *note {
	for _, n := range c.front() {
		if !n.done && match(n) {
			return n
		}
	}
	return nil
}

// submit pins up a note, unless invalid says what is wrong with its arguments.
func (c *Communicator) submit(n *note, invalid error) error {
	inGroup := c.group.Enter()
	c.board.mu.Lock()
	defer c.board.mu.Unlock()
	err := c.usable(n.call)
	if err == nil {
		err = invalid
	}
	switch {
	case err != nil:
		return c.group.Refuse(err)
	case inGroup:
		c.held = append(c.held, n)
	default:
		c.pinUp([]*note{n})
	}
	return nil
}

// pinUp adds operations that start together. The caller holds the lock.
func (c *Communicator) pinUp(together []*note) {
	c.queue = append(c.queue, together)
	c.board.progress()
}

// usable returns why the communicator takes no more calls, or nil. The caller
// holds the lock.
func (c *Communicator) usable(call string) error {
	switch {
	case c.closed:
		return c.check.Fail(call, comm.ErrClosed)
	case c.board.failure != nil:
		return c.check.Fail(call, fmt.Errorf("%w: %w", comm.ErrBroken, c.board.failure))
	}
	return nil
}

// usableNow is usable for a caller that does not hold the lock.
func (c *Communicator) usableNow(call string) error {
	c.board.mu.Lock()
	defer c.board.mu.Unlock()
	return c.usable(call)
}

// Rank implements [comm.Communicator].
func (c *Communicator) Rank() int { return c.rank }

// WorldSize implements [comm.Communicator].
func (c *Communicator) WorldSize() int { return c.check.WorldSize }

// AllReduce implements [comm.Communicator].
func (c *Communicator) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	return c.submit(&note{what: what{call: "allreduce", count: count, dt: dt, op: op}, send: send, recv: recv},
		c.check.AllReduce(send, recv, count, dt, op))
}

// Broadcast implements [comm.Communicator].
func (c *Communicator) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	return c.submit(&note{what: what{call: "broadcast", count: count, dt: dt, root: root}, send: buf, recv: buf},
		c.check.Broadcast(buf, count, dt, root))
}

// Reduce implements [comm.Communicator].
func (c *Communicator) Reduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp, root int) error {
	return c.submit(&note{what: what{call: "reduce", count: count, dt: dt, op: op, root: root}, send: send, recv: recv},
		c.check.Reduce(send, recv, count, dt, op, root))
}

// AllGather implements [comm.Communicator].
func (c *Communicator) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	return c.submit(&note{what: what{call: "allgather", count: count, dt: dt}, send: send, recv: recv},
		c.check.AllGather(send, recv, count, dt))
}

// AllGatherV implements [comm.Communicator].
func (c *Communicator) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	return c.submit(&note{what: what{call: "allgatherv", dt: dt}, send: send, recv: recv,
		recvCounts: slices.Clone(counts), recvDispls: slices.Clone(displs)},
		c.check.AllGatherV(send, recv, counts, displs, dt))
}

// ReduceScatter implements [comm.Communicator].
func (c *Communicator) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	return c.submit(&note{what: what{call: "reducescatter", count: count, dt: dt, op: op}, send: send, recv: recv},
		c.check.ReduceScatter(send, recv, count, dt, op))
}

// AllToAll implements [comm.Communicator].
func (c *Communicator) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	return c.submit(&note{what: what{call: "alltoall", count: count, dt: dt}, send: send, recv: recv},
		c.check.AllToAll(send, recv, count, dt))
}

// AllToAllV implements [comm.Communicator].
func (c *Communicator) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	return c.submit(&note{what: what{call: "alltoallv", dt: dt}, send: send, recv: recv,
		sendCounts: slices.Clone(sendCounts), sendDispls: slices.Clone(sendDispls),
		recvCounts: slices.Clone(recvCounts), recvDispls: slices.Clone(recvDispls)},
		c.check.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt))
}

// Gather implements [comm.Communicator].
func (c *Communicator) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return c.submit(&note{what: what{call: "gather", count: count, dt: dt, root: root}, send: send, recv: recv},
		c.check.Gather(send, recv, count, dt, root))
}

// Scatter implements [comm.Communicator].
func (c *Communicator) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return c.submit(&note{what: what{call: "scatter", count: count, dt: dt, root: root}, send: send, recv: recv},
		c.check.Scatter(send, recv, count, dt, root))
}

// Send implements [comm.Communicator].
func (c *Communicator) Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
	return c.submit(&note{what: what{call: "send", count: count, dt: dt, root: dest, tag: tag}, send: buf},
		c.check.Send(buf, count, dt, dest))
}

// Recv implements [comm.Communicator].
func (c *Communicator) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	return c.submit(&note{what: what{call: "recv", count: count, dt: dt, root: src, tag: tag}, recv: buf},
		c.check.Recv(buf, count, dt, src))
}

// Group implements [comm.Communicator].
func (c *Communicator) Group(submit func() error) error {
	if err := c.usableNow("group"); err != nil {
		return c.group.Refuse(err)
	}
	return c.group.Run(submit, func(err error) error {
		c.board.mu.Lock()
		defer c.board.mu.Unlock()
		if err == nil && len(c.held) > 0 {
			c.pinUp(c.held)
		}
		c.held = nil
		return nil
	})
}

// Sync implements [comm.Communicator].
func (c *Communicator) Sync(ctx context.Context) error { return c.finish(ctx, "sync", nil) }

// Barrier implements [comm.Communicator].
func (c *Communicator) Barrier(ctx context.Context) error {
	return c.finish(ctx, "barrier", &note{what: what{call: "barrier"}})
}

// Split implements [comm.Communicator].
func (c *Communicator) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	var child *Communicator
	n := &note{what: what{call: "split"}, color: color, key: key, child: &child}
	if err := c.finish(ctx, "split", n); err != nil || child == nil {
		return nil, err
	}
	return child, nil
}

// finish submits n, if there is one, and waits for everything submitted.
func (c *Communicator) finish(ctx context.Context, call string, n *note) error {
	if err := c.group.Outside(); err != nil {
		return c.group.Refuse(c.check.Fail(call, err))
	}
	if n != nil {
		if err := c.submit(n, nil); err != nil {
			return err
		}
	} else if err := c.usableNow(call); err != nil {
		return err
	}
	if err := c.board.wait(ctx, func() bool { return len(c.queue) == 0 }); err != nil {
		return c.check.Fail(call, err)
	}
	return nil
}

// patience is how long Close waits for operations that are under way.
const patience = time.Second

// Close implements [comm.Communicator].
func (c *Communicator) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := c.board.wait(ctx, func() bool { return c.closed || len(c.queue) == 0 }); err != nil {
		slog.Warn("communicator closed with operations under way", "backend", backend, "rank", c.rank, "error", err)
	}
	c.board.mu.Lock()
	defer c.board.mu.Unlock()
	c.closed = true
	c.board.progress()
	return nil
}

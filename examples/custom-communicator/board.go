package main

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// board is where the ranks of one world pin up what they want done. Whoever
// pins up the last missing note also does the work, under the board's lock:
// slow, but short, and every promise of the contract can be seen in it.
type board struct {
	mu      sync.Mutex
	ranks   []*Communicator
	changed chan struct{} // closed and replaced whenever something was done
	failure error         // set once: the world is broken
}

// note is one operation that one rank asks for.
type note struct {
	what // what all ranks must agree on
	send uintptr
	recv uintptr
	// layouts of the V-collectives, in elements
	sendCounts, sendDispls, recvCounts, recvDispls []int
	color, key                                     int            // of a split
	child                                          **Communicator // result of a split
	done                                           bool
}

// progress does everything that can be done now. Operations of one rank are
// done in the order of its queue, those of one group as they can.
func (b *board) progress() {
	for b.failure == nil && (b.collective() || b.message()) {
		for _, c := range b.ranks {
			for len(c.queue) > 0 && !slices.ContainsFunc(c.queue[0], pending) {
				c.queue = c.queue[1:]
			}
		}
		b.announce()
	}
	for _, c := range b.ranks {
		for _, n := range c.front() {
			if left := b.missing(n); left >= 0 && !n.done {
				b.fail(fmt.Errorf("%w: rank %d has left", comm.ErrPeerFailed, left))
			}
		}
	}
}

func pending(n *note) bool { return !n.done }

// missing returns a rank that n needs and that has closed, or -1.
func (b *board) missing(n *note) int {
	for r, c := range b.ranks {
		if c.closed && (!n.isMessage() || n.root == r) {
			return r
		}
	}
	return -1
}

// announce wakes everybody who waits for a change.
func (b *board) announce() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// fail breaks the world.
func (b *board) fail(err error) {
	if b.failure == nil {
		b.failure = err
		b.announce()
	}
}

// collective does the collective that every rank has come to, if there is one.
func (b *board) collective() bool {
	notes := make([]*note, len(b.ranks))
	for r, c := range b.ranks {
		if notes[r] = c.next(func(n *note) bool { return !n.isMessage() }); notes[r] == nil {
			return false
		}
	}
	for r, n := range notes {
		if n.what != notes[0].what {
			b.fail(fmt.Errorf("%w: rank 0 called %v, rank %d called %v", comm.ErrMismatch, notes[0].what, r, n.what))
			return false
		}
		if err := agree(notes, r); err != nil {
			b.fail(err)
			return false
		}
	}
	perform(b, notes)
	for _, n := range notes {
		n.done = true
	}
	return true
}

// agree compares the layouts of rank r with those of the others.
func agree(notes []*note, r int) error {
	switch notes[r].call {
	case "allgatherv":
		if !reflect.DeepEqual(notes[r].recvCounts, notes[0].recvCounts) {
			return fmt.Errorf("%w: counts are %v on rank 0, %v on rank %d",
				comm.ErrMismatch, notes[0].recvCounts, notes[r].recvCounts, r)
		}
	case "alltoallv":
		for d, n := range notes {
			if sent, want := notes[r].sendCounts[d], n.recvCounts[r]; sent != want {
				return fmt.Errorf("%w: rank %d sends %d elements, rank %d receives %d", comm.ErrMismatch, r, sent, d, want)
			}
		}
	}
	return nil
}

// message does one send whose receive is there.
func (b *board) message() bool {
	for src, c := range b.ranks {
		for _, s := range c.front() {
			if s.done || s.call != "send" {
				continue
			}
			dest := b.ranks[s.root]
			r := dest.next(func(n *note) bool { return n.call == "recv" && n.root == src && n.tag == s.tag })
			if r == nil || c.next(s.sameEnvelope) != s {
				continue
			}
			if s.count != r.count || s.dt != r.dt {
				b.fail(fmt.Errorf("%w: rank %d sent %d %v, rank %d receives %d %v",
					comm.ErrMismatch, src, s.count, s.dt, dest.rank, r.count, r.dt))
				return false
			}
			b.try(memory.Copy(r.recv, s.send, s.count*s.dt.Size()))
			s.done, r.done = true, true
			return true
		}
	}
	return false
}

// sameEnvelope reports whether a message travels on the same path as n, so that
// the two must keep their order.
func (n *note) sameEnvelope(o *note) bool {
	return o.call == n.call && o.root == n.root && o.tag == n.tag
}

// perform does a collective on all ranks at once.
func perform(b *board, notes []*note) {
	me := notes[0]
	size, bytes := len(notes), me.count*me.dt.Size()
	at := func(p uintptr, part int) uintptr { return p + uintptr(part*bytes) }
	column := func(f func(n *note) uintptr) []uintptr {
		out := make([]uintptr, size)
		for r, n := range notes {
			out[r] = f(n)
		}
		return out
	}
	sends := column(func(n *note) uintptr { return n.send })
	recvs := column(func(n *note) uintptr { return n.recv })
	switch me.call {
	case "allreduce":
		b.try(memory.Reduce(recvs, sends, me.count, me.dt, me.op))
	case "reduce":
		b.try(memory.Reduce(recvs[me.root:me.root+1], sends, me.count, me.dt, me.op))
	case "reducescatter":
		for r := range notes {
			parts := column(func(n *note) uintptr { return at(n.send, r) })
			b.try(memory.Reduce(recvs[r:r+1], parts, me.count, me.dt, me.op))
		}
	case "broadcast":
		for _, recv := range recvs {
			b.copyUnlessSame(recv, sends[me.root], bytes)
		}
	case "allgather":
		for _, recv := range recvs {
			for r, send := range sends {
				b.copyUnlessSame(at(recv, r), send, bytes)
			}
		}
	case "gather":
		for r, send := range sends {
			b.copyUnlessSame(at(recvs[me.root], r), send, bytes)
		}
	case "scatter":
		for r, recv := range recvs {
			b.copyUnlessSame(recv, at(sends[me.root], r), bytes)
		}
	case "alltoall":
		for dest, recv := range recvs {
			for src, send := range sends {
				b.copyUnlessSame(at(recv, src), at(send, dest), bytes)
			}
		}
	case "allgatherv", "alltoallv":
		for dest, to := range notes {
			for src, from := range notes {
				part, size := from.send, uintptr(me.dt.Size())
				if me.call == "alltoallv" {
					part += uintptr(from.sendDispls[dest]) * size
				}
				b.copyUnlessSame(to.recv+uintptr(to.recvDispls[src])*size, part, to.recvCounts[src]*me.dt.Size())
			}
		}
	case "split":
		split(b, notes)
	}
}

// memory copies and reduces; every buffer of this backend is host memory.
var memory = cpu.New()

func (b *board) copyUnlessSame(dst, src uintptr, bytes int) {
	if dst != src && bytes > 0 {
		b.try(memory.Copy(dst, src, bytes))
	}
}

// try breaks the world if something failed.
func (b *board) try(err error) {
	if err != nil {
		b.fail(err)
	}
}

// split makes one world per color.
func split(b *board, notes []*note) {
	members := map[int][]int{}
	for r, n := range notes {
		if n.color >= 0 {
			members[n.color] = append(members[n.color], r)
		}
	}
	for _, ranks := range members {
		slices.SortStableFunc(ranks, func(x, y int) int { return notes[x].key - notes[y].key })
		for i, c := range newWorld(len(ranks)) {
			*notes[ranks[i]].child = c
		}
	}
}

// wait waits until ready reports true, the world breaks, or ctx is done.
func (b *board) wait(ctx context.Context, ready func() bool) error {
	for {
		b.mu.Lock()
		changed, failure, done := b.changed, b.failure, ready()
		b.mu.Unlock()
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
			b.mu.Lock()
			b.fail(errors.Join(comm.ErrPeerFailed, err))
			b.mu.Unlock()
			return err
		}
	}
}

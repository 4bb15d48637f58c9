package local

import "github.com/tutti-go/tutti/comm"

// newOp takes an operation from those that are idle. The caller holds e.mu.
func (e *endpoint) newOp(c *comm.Call, split *splitCall) *op {
	var o *op
	if last := len(e.idle) - 1; last >= 0 {
		o = e.idle[last]
		e.idle = e.idle[:last]
	} else {
		o = &op{owner: e}
	}
	o.entry, o.tag = newEntry(c), c.Tag
	o.extra.set(c, split)
	return o
}

// recycle keeps an operation that is done for reuse. The caller holds e.mu.
func (e *endpoint) recycle(o *op) {
	o.split = nil
	o.match = nil
	e.idle = append(e.idle, o)
}

// call returns what the operation was made of, but for its lists.
func (o *op) call() comm.Call {
	c := o.entry.call()
	c.Tag = o.tag
	return c
}

// source and destination of a message.
func (o *op) source() int {
	if o.op == comm.OpSend {
		return o.owner.rank
	}
	return int(o.peer)
}

func (o *op) destination() int {
	if o.op == comm.OpSend {
		return int(o.peer)
	}
	return o.owner.rank
}

// matches reports whether two operations are the sides of one message.
func (o *op) matches(candidate *op) bool {
	return o.op != candidate.op && o.tag == candidate.tag && o.source() == candidate.source()
}

// buffer returns the memory that a message uses on its side.
func (o *op) buffer() (start, end uintptr) {
	start = o.send
	if o.op == comm.OpRecv {
		start = o.recv
	}
	return start, start + uintptr(o.count*o.dt.Size())
}

// conflicts reports whether two messages of one rank touch the same memory,
// at least one of them writing it.
func (o *op) conflicts(started *op) bool {
	if o.op == comm.OpSend && started.op == comm.OpSend {
		return false
	}
	a, aEnd := o.buffer()
	b, bEnd := started.buffer()
	return max(a, b) < min(aEnd, bEnd) // nothing overlaps an empty buffer
}

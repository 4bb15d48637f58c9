package local

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/internal/spans"
)

// newOp takes an operation from those that are idle. The caller holds e.mu.
func (e *endpoint) newOp(c *comm.Call, split *splitCall, sums []fixedpoint.Sum) *op {
	var o *op
	if last := len(e.idle) - 1; last >= 0 {
		o = e.idle[last]
		e.idle = e.idle[:last]
	} else {
		o = &op{owner: e}
	}
	o.entry = newEntry(c)
	o.tag = c.Tag
	o.extra.set(c, split, sums)
	return o
}

// recycle keeps an operation that is done for reuse. The caller holds e.mu.
func (e *endpoint) recycle(o *op) {
	o.split = nil
	o.sums = nil
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

// key tells a message from others to the same rank: its source and its tag.
func (o *op) key() uint64 { return uint64(o.source())<<32 | uint64(o.tag) }

// buffer returns the memory that a message uses on its side.
func (o *op) buffer() (start, end uintptr) {
	start = o.send
	if o.op == comm.OpRecv {
		start = o.recv
	}
	return start, start + uintptr(o.count*o.dt.Size())
}

// conflicts reports whether a message touches memory that an open one of its rank writes, or the other way round. The
// caller holds e.mu.
func (e *endpoint) conflicts(o *op) bool {
	always := func(*op) bool { return true }
	start, end := o.buffer()
	return e.written.Overlaps(start, end, always) || o.op == comm.OpRecv && e.read.Overlaps(start, end, always)
}

// open notes that a message was posted. The caller holds e.mu.
func (e *endpoint) open(o *op) {
	o.place = len(e.opened)
	e.opened = append(e.opened, o)
	if start, end := o.buffer(); start < end {
		o.memory = e.touched(o).Insert(start, end, o)
	}
}

// close notes that a posted message is done. The caller holds e.mu.
func (e *endpoint) close(o *op) {
	last := len(e.opened) - 1
	moved := e.opened[last]
	e.opened[o.place] = moved
	moved.place = o.place
	e.opened[last] = nil
	e.opened = e.opened[:last]
	if o.memory != 0 {
		e.touched(o).Remove(o.memory)
		o.memory = 0
	}
}

// touched returns the memory that open messages read or write, whichever o does.
func (e *endpoint) touched(o *op) *spans.Set[*op] {
	if o.op == comm.OpSend {
		return &e.read
	}
	return &e.written
}

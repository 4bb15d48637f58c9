package mpi

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// entry is what errors say about a call.
type entry struct {
	count  int
	peer   int32
	tag    uint16
	op     comm.Op
	dt     dtype.DType
	reduce comm.ReduceOp
}

func newEntry(c *comm.Call) entry {
	return entry{count: c.Count, peer: int32(c.Peer), tag: uint16(c.Tag), op: c.Op, dt: c.DType, reduce: c.Reduce}
}

// call returns the call without addresses and lists.
func (e entry) call() comm.Call {
	return comm.Call{Op: e.op, DType: e.dt, Reduce: e.reduce, Tag: uint32(e.tag), Peer: int(e.peer), Count: e.count}
}

// String describes the call as errors do.
func (e entry) String() string { return e.call().String() }

// op is one operation from submission to completion: a call, or one of several parts of
// it. It takes a step at a time. A step posts messages, and the endpoint takes the next one
// when these are done.
type op struct {
	plan

	// The rest is kept for the next use.

	// Of exchanges: where the message to (from) each rank starts, relative to send (recv),
	// and its length, in bytes.
	sendAt, sendBytes, recvAt, recvBytes []int

	native  invocation // of native collectives
	vectors uintptr    // their counts and displacements

	readNode, writeNode spanNode // of what it reads and writes, once it has started

	dst  [1]uintptr // the result of a reduction
	srcs []uintptr  // its operands, in rank order
}

// plan is the part of an op that changes with each use.
type plan struct {
	entry
	step step

	at       int     // its place in the endpoint's list
	phase    int     // steps taken
	inFlight int     // messages
	number   uint64  // of the message, or of the collective that it is part of
	sequence uint64  // of the collective, for users
	seq      uint64  // its own among the operations of collectives
	group    uint64  // operations of one group do not wait for each other
	external bool    // is a collective of the MPI library
	msgTag   uintptr // of the first phase's messages; later phases of a collective follow
	chained  bool    // waits for earlier operations in a group, too
	reads    span    // what the operation reads,
	writes   span    // and what it writes, for the order between operations

	send, recv uintptr

	// Of reductions: the rank that gets the result, or one of the constants below. Rank r
	// reduces share elements that start at element r*stride of send. All shares together are
	// total elements, and go to the given number of peers at a time.
	to                          int
	share, stride, total, peers int

	// Of collectives over the segment: the fingerprint of all calls up to this one, the
	// bytes that this rank shares, and the most that any rank does.
	shared       bool
	fingerprint  uint64
	shares, most int

	memory scratch // working memory while the operation runs
	work   int     // bytes of it that the operation needs
}

// step posts the messages of an operation's next phase and reports whether
// there is none left. It is called whenever no message of the operation is
// in flight.
type step func(e *endpoint, o *op) (done bool, err error)

// newOp returns an empty operation among size ranks.
func newOp(size int) *op {
	at := make([]int, 4*size)
	return &op{
		sendAt: at[:size], sendBytes: at[size : 2*size],
		recvAt: at[2*size : 3*size], recvBytes: at[3*size:],
		srcs: make([]uintptr, size),
	}
}

// Values of op.to of a reduction that does not end at a root.
const (
	everybody = -1 // all ranks get the whole result
	nobody    = -2 // each rank keeps its share of it
)

// collective reports whether the operation takes tags of its own.
func (o *op) collective() bool { return !o.op.Message() }

// span is a range of memory.
type span struct{ from, to uintptr }

func spanOf(address uintptr, bytes int) span { return span{address, address + uintptr(bytes)} }

func (s span) overlaps(t span) bool {
	return max(s.from, t.from) < min(s.to, t.to)
}

// conflicts reports whether o has to wait for an earlier operation, which writes memory that
// o uses, or uses memory that o writes.
func (o *op) conflicts(earlier *op) bool {
	if o.group != 0 && o.group == earlier.group && !o.chained {
		return false
	}
	return o.writes.overlaps(earlier.writes) || o.writes.overlaps(earlier.reads) || o.reads.overlaps(earlier.writes)
}

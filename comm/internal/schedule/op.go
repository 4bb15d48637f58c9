package schedule

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
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

// Op is one operation from submission to completion: a call, or one of several parts of
// it. It takes a step at a time. A step posts messages, and the engine takes the next one
// when these are done.
type Op struct {
	plan

	// The rest is kept for the next use.

	// Of exchanges: where the message to (from) each rank starts, relative to send (recv),
	// and its length, in bytes.
	sendAt, sendBytes, recvAt, recvBytes []int

	Extra any     // what an [Offload] keeps for the next use as well
	small uintptr // working memory of smallBytes, once it was needed

	dst  [1]uintptr // the result of a reduction
	srcs []uintptr  // its operands, in rank order
}

// plan is the part of an Op that changes with each use.
type plan struct {
	entry
	Step     Step
	External bool // a collective that the transport does: whom it waits for is not known
	reads    span // what the operation reads and writes, for the order between operations
	writes   span

	at, use  int    // its places in the engine's lists
	phase    int    // steps taken
	inFlight int    // messages
	number   uint64 // of the message, or of the collective that it is part of
	sequence uint64 // of the collective, for users
	seq      uint64 // its own among the operations of collectives
	group    uint64 // operations of one group do not wait for each other
	tag      uint64 // of the first phase's messages; later phases of a collective follow
	chained  bool   // waits for earlier operations in a group, too

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

	memory uintptr // working memory while the operation runs
	work   int     // bytes of it that the operation needs
}

// Step posts the messages of an operation's next phase and reports whether
// there is none left. It is called whenever no message of the operation is
// in flight.
type Step func(e *Engine, o *Op) (done bool)

// First reports whether the operation takes its first step.
func (o *Op) First() bool { return o.phase == 0 }

// newOp returns an empty operation among size ranks.
func newOp(size int) *Op {
	at := make([]int, 4*size)
	return &Op{
		sendAt: at[:size], sendBytes: at[size : 2*size],
		recvAt: at[2*size : 3*size], recvBytes: at[3*size:],
		srcs: make([]uintptr, size),
	}
}

// host is where working memory comes from: outside the Go heap, as
// wires keep addresses while messages are in flight.
var host = cpu.New()

// smallBytes is how much working memory an operation keeps for the next use: enough for a
// message's head and short data.
const smallBytes = headBytes + shortBytes

// prepare allocates what the operation needs to start.
func (o *Op) prepare() (err error) {
	if o.work > smallBytes {
		o.memory, err = host.Allocate(o.work)
	} else if o.work > 0 {
		if o.small == 0 {
			o.small, err = host.Allocate(smallBytes)
		}
		o.memory = o.small
	}
	return err
}

// Values of Op.to of a reduction that does not end at a root.
const (
	everybody = -1 // all ranks get the whole result
	nobody    = -2 // each rank keeps its share of it
)

// collective reports whether the operation takes tags of its own.
func (o *Op) collective() bool { return !o.op.Message() }

// span is a range of memory, or none if it is zero.
type span struct{ from, to uintptr }

func spanOf(address uintptr, bytes int) span {
	if bytes == 0 {
		return span{}
	}
	return span{address, address + uintptr(bytes)}
}

// overlaps reports whether two ranges have a byte in common.
func (s span) overlaps(t span) bool { return s.from < t.to && t.from < s.to }

// with returns the least range around two.
func (s span) with(t span) span {
	if s == (span{}) || t == (span{}) {
		return span{s.from + t.from, s.to + t.to}
	}
	return span{min(s.from, t.from), max(s.to, t.to)}
}

// usage is the memory of an operation that has started: the engine looks at that of all of
// them before it starts another one.
type usage struct {
	op            *Op
	reads, writes span
}

// overlaps reports whether o writes memory that is used, or uses memory that is written.
func (o *Op) overlaps(u *usage) bool {
	return o.writes.overlaps(u.writes) || o.writes.overlaps(u.reads) || o.reads.overlaps(u.writes)
}

// conflicts reports whether o has to wait for an earlier operation.
func (o *Op) conflicts(earlier *usage) bool {
	return o.overlaps(earlier) && (o.chained || o.group != earlier.op.group)
}

package schedule

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// entry is a call as errors describe it.
type entry struct {
	count  int           // elements
	peer   int32         // root, destination or source
	tag    uint32        // of a message
	op     comm.Op       // the operation
	dt     dtype.DType   // type of the elements
	reduce comm.ReduceOp // operation of a reduction
}

func newEntry(c *comm.Call) entry {
	return entry{count: c.Count, peer: int32(c.Peer), tag: c.Tag, op: c.Op, dt: c.DType, reduce: c.Reduce}
}

// call returns the call without addresses and lists.
func (e entry) call() comm.Call {
	return comm.Call{Op: e.op, DType: e.dt, Reduce: e.reduce, Tag: e.tag, Peer: int(e.peer), Count: e.count}
}

// String describes the call as errors do.
func (e entry) String() string { return e.call().String() }

// Op is one operation from submission to completion: a call, or one of several parts of it. It advances in steps. A
// step posts messages, and the engine takes the next step when these are complete.
type Op struct {
	plan

	// The fields below are kept for reuse.

	// For exchanges, by rank: the offset of the part for (from) a rank in send (recv), and its length, in bytes.
	sendOffsets, sendBytes []int
	recvOffsets, recvBytes []int

	Extra any     // kept by an [Offload] for reuse
	small uintptr // working memory of smallBytes; 0 before its first use

	dst  [2]uintptr // destination of the result of a reduction
	srcs []uintptr  // its operands, in rank order
}

// plan is the part of an Op that changes with each use.
type plan struct {
	entry
	Step     Step    // posts the messages of the next phase
	External bool    // a collective of the transport: the ranks that it waits for are unknown
	send     uintptr // the send buffer, at the start of this operation
	recv     uintptr // the same for the result
	reads    span    // memory that the operation reads, for the order of operations
	writes   span    // memory that it writes

	reduction reduction   // for a reduction by messages
	round     sharedRound // for a collective over the segment; zero for others

	// Place in the order of operations.
	number   uint64 // of the message, or of the collective that it is part of
	sequence uint64 // of the collective, for users; 0 in SetUp
	seq      uint64 // of this operation, among those of collectives
	group    uint64 // operations of one group do not wait for each other
	chained  bool   // waits for earlier operations even within its group
	tag      uint64 // of the first phase's messages; later phases of a collective follow

	// For an operation that has started.
	index    int     // in the engine's running or transfers
	reading  int32   // place of the memory that it reads in the engine's memory, 0 for none
	writing  int32   // the same for the memory that it writes
	phase    int     // steps taken
	inFlight int     // messages
	memory   uintptr // working memory; 0 for none
	work     int     // bytes of working memory that the operation needs
}

// reduction is the part of a plan for a reduction. Rank r reduces share elements beginning at element r*stride of
// send. All shares together have total elements.
type reduction struct {
	to     int // the rank that gets the result, everybody or nobody
	share  int // elements; 0 without shares
	stride int // elements
	total  int // elements
	peers  int // number of ranks to which shares are sent at a time
}

// sharedRound is the part of a plan for a collective over the segment.
type sharedRound struct {
	active      bool   // false: the operation does not use the segment
	fingerprint uint64 // of all calls up to this one
	bytes       int    // data that this rank shares
	maxBytes    int    // maximum over all ranks; 0 for a reduction by shares
	blocks      int    // for a reduction by shares; 0 for others
	block       int    // elements of a block, of each share if each rank keeps its own
}

// Step posts the messages of an operation's next phase, and reports whether it was the last. It is called whenever no
// message of the operation is in flight.
type Step func(e *Engine, o *Op) (done bool)

// First reports whether the operation takes its first step.
func (o *Op) First() bool { return o.phase == 0 }

// newOp returns an empty operation among size ranks.
func newOp(size int) *Op {
	lists := make([]int, 4*size)
	return &Op{
		sendOffsets: lists[:size],
		sendBytes:   lists[size : 2*size],
		recvOffsets: lists[2*size : 3*size],
		recvBytes:   lists[3*size:],
		srcs:        make([]uintptr, size),
	}
}

// host provides working memory outside the Go heap, since wires keep addresses while messages are in flight.
var host = cpu.New()

// smallBytes is the working memory that an operation keeps for reuse: enough for a message's head and short data.
const smallBytes = HeadedBytes

// prepare allocates the memory that the operation needs to start.
func (o *Op) prepare() (err error) {
	if o.work == 0 {
		return nil
	}
	if o.work > smallBytes {
		o.memory, err = host.Allocate(o.work)
		return err
	}
	if o.small == 0 {
		o.small, err = host.Allocate(smallBytes)
	}
	o.memory = o.small
	return err
}

// Values of reduction.to for results without a root.
const (
	everybody = -1 // all ranks get the whole result
	nobody    = -2 // each rank keeps its share of it
)

// collective reports whether the operation takes its own tags.
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

// with returns the smallest range that includes both.
func (s span) with(t span) span {
	if s == (span{}) || t == (span{}) {
		return span{s.from + t.from, s.to + t.to}
	}
	return span{min(s.from, t.from), max(s.to, t.to)}
}

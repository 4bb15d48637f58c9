package mpi

import (
	"github.com/tutti-go/tutti/dtype"
)

// op is one operation from submission to completion. What it does is a
// function that posts one phase of messages at a time; the engine calls it
// again when these are done.
type op struct {
	name string
	// step posts the messages of the next phase and returns true when there is
	// none left. It is called whenever no message of the operation is pending.
	step func(e *engine, o *op) (done bool, err error)

	phase   int
	pending int     // messages posted and not done
	group   uint64  // operations of one group do not wait for each other
	tag     uintptr // of a collective's first phase; later ones follow
	private bool    // a collective, which takes tags of its own
	chained bool    // waits for earlier operations in a group, too
	reads   span    // what the operation reads,
	writes  span    // and what it writes, for the order between operations

	send, recv uintptr
	dt         dtype.DType
	red        dtype.ReduceOp
	peer       int     // root, destination, source, or one of the constants below
	mpiType    uintptr // of the elements of a user's message

	// Of operations that only move data: where the message to (from) each rank
	// starts, from send (recv) on, and its length, in bytes.
	sendAt, sendBytes, recvAt, recvBytes []int

	// Of reductions: rank r reduces share elements that start at element
	// r*stride of send; all shares together are total elements.
	share, stride, total int

	call    call    // of native collectives
	vectors uintptr // their counts and displacements

	memory scratch    // working memory while the operation runs
	work   int        // bytes of it that the operation needs
	dst    [1]uintptr // the result of a reduction
	srcs   []uintptr  // its operands, in rank order
}

// newOp returns an empty operation among size ranks.
func newOp(size int) *op {
	at := make([]int, 4*size)
	return &op{
		sendAt: at[:size], sendBytes: at[size : 2*size],
		recvAt: at[2*size : 3*size], recvBytes: at[3*size:],
		srcs: make([]uintptr, size),
	}
}

// reset makes o ready for its next use; it keeps its slices' memory.
func (o *op) reset() {
	*o = op{
		sendAt: o.sendAt, sendBytes: o.sendBytes, recvAt: o.recvAt, recvBytes: o.recvBytes,
		srcs: o.srcs, vectors: o.vectors,
	}
}

// Values of op.peer of a reduction that does not end at a root.
const (
	everybody = -1 // all ranks get the whole result
	nobody    = -2 // each rank keeps its share of it
)

// span is a range of memory.
type span struct{ from, to uintptr }

func spanOf(address uintptr, bytes int) span { return span{address, address + uintptr(bytes)} }

func (s span) overlaps(t span) bool {
	return max(s.from, t.from) < min(s.to, t.to)
}

// conflicts reports whether o has to wait for an earlier operation: one that
// writes what o uses, or uses what o writes.
func (o *op) conflicts(earlier *op) bool {
	if o.group != 0 && o.group == earlier.group && !o.chained {
		return false
	}
	return o.writes.overlaps(earlier.writes) || o.writes.overlaps(earlier.reads) || o.reads.overlaps(earlier.writes)
}

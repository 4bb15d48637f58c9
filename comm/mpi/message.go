package mpi

import (
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// message plans a Send or a Recv.
func (p planner) message() {
	o := p.op(stepMessage)
	o.msgTag = uintptr(p.c.Tag)
	start, end := p.c.Message()
	if p.c.Op == comm.OpSend {
		o.reads = span{start, end}
	} else {
		o.writes = span{start, end}
	}
	p.add(o)
}

// stepMessage posts a user's message: one MPI message of the elements' own type,
// so that the other end may be any MPI program. Counts beyond an int go through
// the large-count function, or in pieces where the library has none.
func stepMessage(e *endpoint, o *op) (bool, error) {
	if o.phase == 1 {
		return true, nil
	}
	buffer, post, large := o.send, e.lib.Isend, e.lib.IsendC
	receives := o.op == comm.OpRecv
	if receives {
		buffer, post, large = o.recv, e.lib.Irecv, e.lib.IrecvC
	}
	for left, first := o.count, true; left > 0 || first; first = false {
		n, f := left, post
		if n > math.MaxInt32 {
			if f = large; !f.Found() {
				f, n = post, maxMessage
			}
		}
		expected := sent
		if receives {
			expected = n * o.dt.Size()
		}
		if err := e.post(o, f, buffer, n, e.lib.typeOf(o.dt), int(o.peer), o.msgTag, e.pub, expected); err != nil {
			return false, err
		}
		buffer, left = buffer+uintptr(n*o.dt.Size()), left-n
	}
	return false, nil
}

// maxMessage is the most bytes (of a user's message: elements) that go into one
// message where counts are ints.
const maxMessage = 1 << 30

// Messages that are little longer than what a library sends without a
// handshake (4 KiB with Open MPI's shared memory) take less time in two or
// three pieces that are shorter.
const (
	eagerPiece = 2 << 10
	eagerLimit = 6 << 10
)

// pieceOf is the size of the messages that carry that many bytes.
func pieceOf(bytes int) int {
	if bytes <= eagerLimit {
		return eagerPiece
	}
	return maxMessage
}

// sendBytes posts an internal message, in pieces if it is long.
func (e *endpoint) sendBytes(o *op, tag uintptr, buffer uintptr, bytes, dest int) error {
	piece := pieceOf(bytes)
	for bytes > 0 {
		n := min(bytes, piece)
		if err := e.post(o, e.lib.Isend, buffer, n, e.lib.handles.bytes, dest, tag, e.inner, sent); err != nil {
			return err
		}
		buffer, bytes = buffer+uintptr(n), bytes-n
	}
	return nil
}

// recvBytes posts the receive for sendBytes.
func (e *endpoint) recvBytes(o *op, tag uintptr, buffer uintptr, bytes, src int) error {
	piece := pieceOf(bytes)
	for bytes > 0 {
		n := min(bytes, piece)
		if err := e.post(o, e.lib.Irecv, buffer, n, e.lib.handles.bytes, src, tag, e.inner, n); err != nil {
			return err
		}
		buffer, bytes = buffer+uintptr(n), bytes-n
	}
	return nil
}

// post posts one message of o: n elements of an MPI type to or from a rank.
// expected is how many bytes a receive has to get.
func (e *endpoint) post(o *op, f dl.Func, buffer uintptr, n int, mpiType uintptr, rank int, tag, over uintptr, expected int) error {
	slot := e.table.add(o, expected)
	code := e.lib.call(f, buffer, uintptr(n), mpiType, uintptr(rank), tag, over, slot)
	return e.table.posted(e.lib, f, code)
}

package mpi

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
)

// message plans a Send or a Recv. With interop it is one MPI message of the elements' own
// type, as the other end may be any MPI program. Otherwise a head comes first, which describes
// the message. Short data on the host travels with it.
func (p planner) message() {
	o := p.op(stepMessage)
	o.msgTag = uintptr(p.c.Tag)
	start, end := backend.MessageMemory(p.c)
	if p.c.Op == comm.OpSend {
		o.reads = span{start, end}
	} else {
		o.writes = span{start, end}
	}
	p.add(o)
}

// head describes a message, and travels before its data.
type head struct {
	count uint64
	dt    uint64
}

// headBytes is the size of a head, and shortBytes the most data that travels with it.
const (
	headBytes  = 16
	shortBytes = 2 << 10
)

// short reports whether data travels with its head. With native collectives none does, as it
// may be on a device.
func (e *endpoint) short(bytes int) bool { return bytes == 0 || bytes <= shortBytes && !e.native() }

// stepMessage posts a user's message and, at the receiver, takes short data from
// behind the head.
func stepMessage(e *endpoint, o *op) (bool, error) {
	bytes := o.count * o.dt.Size()
	receives := o.op == comm.OpRecv
	if o.phase == 1 {
		if o.memory.address != 0 {
			if receives && e.short(bytes) {
				hostops.Copy(o.recv, o.memory.address+headBytes, bytes, false)
			}
			e.heads.give(o.memory)
			o.memory = scratch{}
		}
		return true, nil
	}
	if e.interop() {
		return false, e.postMessage(o, receives)
	}
	var err error
	if o.memory, err = e.heads.take(headBytes + shortBytes); err != nil {
		return false, err
	}
	hd := &hostmem.Slice[head](o.memory.address, 1)[0]
	if receives {
		*hd = head{}
		e.peers[o.peer].received++
		err = e.post(o, e.lib.Irecv, o.memory.address, headBytes+shortBytes, e.lib.handles.bytes, int(o.peer), o.msgTag, e.pub, headed)
	} else {
		*hd = head{uint64(o.count), uint64(o.dt)}
		n := headBytes
		if e.short(bytes) {
			hostops.Copy(o.memory.address+headBytes, o.send, bytes, false)
			n += bytes
		}
		e.peers[o.peer].sent++
		err = e.post(o, e.lib.Isend, o.memory.address, n, e.lib.handles.bytes, int(o.peer), o.msgTag, e.pub, sent)
	}
	if err != nil || e.short(bytes) {
		return false, err
	}
	return false, e.postMessage(o, receives)
}

// checkHead compares the head of a message, if it has come, with what o expects.
func (o *op) checkHead(r *requests) error {
	if o.op != comm.OpRecv || o.memory.address == 0 {
		return nil
	}
	got := hostmem.Slice[head](o.memory.address, 1)[0]
	if got == (head{uint64(o.count), uint64(o.dt)}) || dtype.DType(got.dt) == dtype.Invalid {
		return nil
	}
	r.failed = o.op
	sent := comm.SendCall(0, int(got.count), dtype.DType(got.dt), r.rank, uint32(o.tag))
	return fmt.Errorf("%w: rank %d called %v, rank %d called %v", comm.ErrMismatch, o.peer, sent, r.rank, o)
}

// postMessage posts the data of a user's message, elements of their own type.
// Counts beyond an int go through the large-count function, or in pieces where
// the library has none.
func (e *endpoint) postMessage(o *op, receives bool) error {
	buffer, post, large := o.send, e.lib.Isend, e.lib.IsendC
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
			return err
		}
		buffer, left = buffer+uintptr(n*o.dt.Size()), left-n
	}
	return nil
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

// pieceOf is the size of the messages that carry that many bytes of o. Ranks may
// disagree about the length of a part of an AllToAllV: it is not cut up, so that
// the length of the message tells.
func (o *op) pieceOf(bytes int) int {
	if bytes <= eagerLimit && o.op != comm.OpAllToAllV {
		return eagerPiece
	}
	return maxMessage
}

// sendBytes posts an internal message, in pieces if it is long; without data, it
// is an empty one.
func (e *endpoint) sendBytes(o *op, tag uintptr, buffer uintptr, bytes, dest int) error {
	piece := o.pieceOf(bytes)
	for {
		n := min(bytes, piece)
		if err := e.post(o, e.lib.Isend, buffer, n, e.lib.handles.bytes, dest, tag, e.inner, sent); err != nil {
			return err
		}
		if bytes -= n; bytes == 0 {
			return nil
		}
		buffer += uintptr(n)
	}
}

// recvBytes posts the receive for sendBytes.
func (e *endpoint) recvBytes(o *op, tag uintptr, buffer uintptr, bytes, src int) error {
	piece := o.pieceOf(bytes)
	for {
		n := min(bytes, piece)
		if err := e.post(o, e.lib.Irecv, buffer, n, e.lib.handles.bytes, src, tag, e.inner, n); err != nil {
			return err
		}
		if bytes -= n; bytes == 0 {
			return nil
		}
		buffer += uintptr(n)
	}
}

// post posts one message of o: n elements of an MPI type to or from a rank.
// expected is how many bytes a receive has to get.
func (e *endpoint) post(o *op, f dl.Func, buffer uintptr, n int, mpiType uintptr, rank int, tag, over uintptr, expected int) error {
	slot, err := e.table.add(e.lib, o, rank, expected)
	if err == nil {
		e.table.calls.Add(f, buffer, uintptr(n), mpiType, uintptr(rank), tag, over, slot)
	}
	return err
}

package mpi

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// The contract's tags have 32 bits, MPI's fewer (MPI_TAG_UB; 2^31-1 with Open
// MPI, 2^28-1 with MPICH over UCX). Messages with a tag beyond travel as two:
// a header with the tag and the length, then the data, both on the internal
// communicator where all such messages between two ranks stay in order. The
// receiver takes them in that order, and keeps what no receive asks for yet.

// Tags of the two messages, above those of the collectives.
const (
	wideHeaderTag  = tagWindow * tagPhases
	wideDataTag    = wideHeaderTag + 1
	wideHeaderSize = 16
)

// inbox is the receiving end of such messages from one rank.
type inbox struct {
	reader  *op      // receives the next one, while receives are waiting
	waiting []*op    // receives without a message, in order
	stash   []parcel // messages without a receive, in order
	next    parcel   // the message under way
	target  *op      // the receive that it is for, nil: for the stash
}

// parcel is a message in memory of this package.
type parcel struct {
	tag    uint64
	bytes  int
	memory uintptr
}

// stepWideSend sends a message with a wide tag.
func stepWideSend(e *engine, o *op) (bool, error) {
	if o.phase == 1 {
		return true, nil
	}
	bytes := o.total * o.dt.Size()
	header := hostmem.Slice[uint64](o.memory.address, 2)
	header[0], header[1] = uint64(o.tag), uint64(bytes)
	if err := e.sendBytes(o, wideHeaderTag, o.memory.address, wideHeaderSize, o.peer); err != nil {
		return false, err
	}
	return false, e.sendBytes(o, wideDataTag, o.send, bytes, o.peer)
}

// stepWideRecv receives a message with a wide tag: from the stash, or when the
// reader finds it.
func stepWideRecv(e *engine, o *op) (bool, error) {
	if o.phase == 1 {
		return true, nil
	}
	box := &e.inboxes[o.peer]
	for i, p := range box.stash {
		if p.tag != uint64(o.tag) {
			continue
		}
		box.stash = append(box.stash[:i], box.stash[i+1:]...)
		if err := p.fits(o); err != nil {
			return false, err
		}
		cpu.Copy(o.recv, p.memory, p.bytes, false)
		return true, host.Deallocate(p.memory)
	}
	box.waiting = append(box.waiting, o)
	o.pending++ // until the reader has it
	if box.reader != nil {
		return false, nil
	}
	box.reader = e.newOp()
	box.reader.name, box.reader.step = o.name, stepWideRead
	box.reader.peer, box.reader.work = o.peer, wideHeaderSize
	e.inFlight.Add(1)
	return false, e.begin(box.reader)
}

// fits checks that the message has the length that the receive expects.
func (p parcel) fits(o *op) error {
	if want := o.total * o.dt.Size(); p.bytes != want {
		return fmt.Errorf("%w: received %d bytes, expected %d", comm.ErrMismatch, p.bytes, want)
	}
	return nil
}

// stepWideRead reads messages from one rank for as long as receives wait:
// headers in even phases, data in odd ones.
func stepWideRead(e *engine, o *op) (bool, error) {
	box := &e.inboxes[o.peer]
	if o.phase%2 == 1 {
		return false, e.readData(o, box)
	}
	if o.phase > 0 {
		e.deliver(box)
	}
	if len(box.waiting) == 0 {
		box.reader = nil
		return true, nil
	}
	return false, e.recvBytes(o, wideHeaderTag, o.memory.address, wideHeaderSize, o.peer)
}

// readData receives the data that a header announces, into the buffer of the
// first receive that waits for it or into the stash.
func (e *engine) readData(o *op, box *inbox) error {
	header := hostmem.Slice[uint64](o.memory.address, 2)
	box.next = parcel{tag: header[0], bytes: int(header[1])}
	box.target = nil
	for _, w := range box.waiting {
		if uint64(w.tag) == box.next.tag {
			box.target = w
			break
		}
	}
	if box.target != nil {
		if err := box.next.fits(box.target); err != nil {
			return err
		}
		return e.recvBytes(o, wideDataTag, box.target.recv, box.next.bytes, o.peer)
	}
	var err error
	if box.next.memory, err = host.Allocate(box.next.bytes); err != nil {
		return err
	}
	return e.recvBytes(o, wideDataTag, box.next.memory, box.next.bytes, o.peer)
}

// deliver hands the message that was read to its receive, or to the stash.
func (e *engine) deliver(box *inbox) {
	if box.target == nil {
		box.stash = append(box.stash, box.next)
		return
	}
	for i, w := range box.waiting {
		if w == box.target {
			box.waiting = append(box.waiting[:i], box.waiting[i+1:]...)
			break
		}
	}
	box.target.pending--
	e.again = true
}

package schedule

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
)

// message plans a Send or a Recv. A head that describes the message comes first. Short data on the host travels with
// it.
func (p planner) message(o *Op) {
	o.tag = uint64(p.c.Tag)
	o.work = smallBytes
	if bytes := p.c.Bytes(); p.c.Op == comm.OpSend {
		o.reads = spanOf(o.send, bytes)
	} else {
		o.writes = spanOf(o.recv, bytes)
	}
	p.add(o)
}

// head describes a message, and travels before its data.
type head struct {
	count uint64 // elements of the message
	dt    uint32 // their type
	tag   uint32 // of the message
}

// headBytes is the size of a head, and shortBytes the most data that travels with it. HeadedBytes is the room for both.
const (
	headBytes   = 16
	shortBytes  = 2 << 10
	HeadedBytes = headBytes + shortBytes
)

// ReadHead returns the tag of a message that has a head, and whether its data follows in messages without one. ok means
// that there is a head.
func ReadHead(message []byte) (tag uint32, followed, ok bool) {
	if len(message) < headBytes {
		return 0, false, false
	}
	hd := &hostmem.Slice[head](hostmem.Addr(message), 1)[0]
	return hd.tag, hd.count > 0 && len(message) == headBytes, true
}

// short reports whether data travels with its head. Data that may be on a device does not.
func (e *Engine) short(bytes int) bool {
	return bytes == 0 || bytes <= shortBytes && e.offload == nil
}

// stepMessage posts a user's message and, at the receiver, copies short data that follows the head.
func stepMessage(e *Engine, o *Op) bool {
	bytes := o.count * o.dt.Size()
	receives := o.op == comm.OpRecv
	if o.phase == 1 {
		if receives && e.short(bytes) {
			hostops.Copy(o.recv, o.memory+headBytes, bytes, false)
		}
		return true
	}
	hd := &hostmem.Slice[head](o.memory, 1)[0]
	m := Message{
		Peer:    int(o.peer),
		Tag:     o.tag,
		User:    true,
		Receive: receives,
		Headed:  true,
		Address: o.memory,
		Bytes:   headBytes,
	}
	data := o.send
	if receives {
		*hd = head{}
		data = o.recv
		m.Bytes = HeadedBytes
		e.peers[o.peer].received++
	} else {
		*hd = o.head()
		if e.short(bytes) {
			hostops.Copy(o.memory+headBytes, o.send, bytes, false)
			m.Bytes += bytes
		}
		e.peers[o.peer].sent++
	}
	e.post(o, m)
	if !e.short(bytes) {
		m.Headed = false
		e.postPieces(o, m, data, bytes, maxMessage)
	}
	return false
}

// headedBytes is the length of a message of o that begins with its head.
func (e *Engine) headedBytes(o *Op) int {
	bytes := o.count * o.dt.Size()
	if e.short(bytes) {
		return headBytes + bytes
	}
	return headBytes
}

// head returns the head of a message.
func (o *Op) head() head {
	return head{
		count: uint64(o.count),
		dt:    uint32(o.dt),
		tag:   uint32(o.tag),
	}
}

// checkHead compares the head of a message with the expectations of o. If its arrival is unknown, a head with its tag
// that is not zero has arrived. One with another tag is not its own (see [Message]).
func (e *Engine) checkHead(o *Op, came bool) error {
	if o.op != comm.OpRecv || o.memory == 0 {
		return nil
	}
	got := hostmem.Slice[head](o.memory, 1)[0]
	if got == o.head() || !came && (got == (head{}) || uint64(got.tag) != o.tag) {
		return nil
	}
	sent := comm.SendCall(0, int(got.count), dtype.DType(min(got.dt, math.MaxUint8)), e.rank, got.tag)
	return fmt.Errorf("%w: rank %d called %v, rank %d called %v", comm.ErrMismatch, o.peer, sent, e.rank, o)
}

// maxMessage is the maximum length of one message in bytes.
const maxMessage = 1 << 30

// Messages slightly longer than those that a library sends without a handshake (4 KiB with Open MPI's shared memory)
// take less time in two or three shorter pieces.
const (
	eagerPiece = 2 << 10
	eagerLimit = 6 << 10
)

// linkPiece is the longest message that Open MPI sends over TCP without a handshake, less its header. If a handshake
// queues behind data on a slow link, an exchange without one takes half the time.
const linkPiece = 64<<10 - 256

// pieceOf returns the size of the messages for this many bytes of o. Ranks may disagree about the length of a part of
// an AllToAllV: it is not split, so that the length of the message shows the disagreement.
func (e *Engine) pieceOf(o *Op, bytes int) int {
	switch {
	case !e.pieces || o.op == comm.OpAllToAllV:
	case bytes <= eagerLimit:
		return eagerPiece
	case e.segment.memory == nil && !o.op.Reduces():
		return linkPiece
	}
	return maxMessage
}

// sendBytes posts an internal message, in pieces if it is long. Without data it posts an empty one.
func (e *Engine) sendBytes(o *Op, tag uint64, buffer uintptr, bytes, dest int) {
	e.postPieces(o, Message{Peer: dest, Tag: tag}, buffer, bytes, e.pieceOf(o, bytes))
}

// recvBytes posts the receives for sendBytes.
func (e *Engine) recvBytes(o *Op, tag uint64, buffer uintptr, bytes, src int) {
	e.postPieces(o, Message{Peer: src, Tag: tag, Receive: true}, buffer, bytes, e.pieceOf(o, bytes))
}

// postPieces posts messages like m for bytes at an address.
func (e *Engine) postPieces(o *Op, m Message, address uintptr, bytes, piece int) {
	for {
		m.Address = address
		m.Bytes = min(bytes, piece)
		e.post(o, m)
		bytes -= m.Bytes
		if bytes == 0 {
			return
		}
		address += uintptr(m.Bytes)
	}
}

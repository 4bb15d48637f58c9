package schedule

import (
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostops"
)

// All collectives that only move data, except short broadcasts, are an exchange: every rank sends every other rank a
// part of its data. Empty parts are sent as well, so that ranks that disagree notice. For that reason the root of a
// Scatter gets an empty message from every rank.

// exchange plans a call that is one exchange.
func (p planner) exchange() {
	o := p.parts()
	c := p.c
	for r := range p.size {
		if from, bytes, ok := p.sendPart(o, r); ok {
			o.sends(r, int(from-c.Send), bytes)
		}
		if to, bytes, ok := p.recvPart(o, r); ok {
			o.receives(r, int(to-c.Recv), bytes)
		}
		if c.Op != comm.OpScatter || r == p.rank {
			continue
		}
		if p.rank == c.Peer {
			o.receives(r, 0, 0)
		} else if r == c.Peer {
			o.sends(r, 0, 0)
		}
	}
	p.add(o)
}

// parts returns an exchange without any parts.
func (p planner) parts() *Op {
	o := p.op(stepExchange)
	for r := range p.size {
		o.sendBytes[r] = nothing
		o.recvBytes[r] = nothing
	}
	return o
}

// nothing is the length of a part that is not sent.
const nothing = -1

// sends sets the number of bytes for rank r, and their offset in the send buffer.
func (o *Op) sends(r, offset, bytes int) {
	o.sendOffsets[r] = offset
	o.sendBytes[r] = bytes
}

// receives sets the number of bytes from rank r, and their offset in the receive buffer.
func (o *Op) receives(r, offset, bytes int) {
	o.recvOffsets[r] = offset
	o.recvBytes[r] = bytes
}

// stepExchange sends every rank its part of send and receives every rank's part of recv. If parts are in pieces, each
// phase moves a window, so that few messages are in flight and a straggler receives little that it has no room for.
func stepExchange(e *Engine, o *Op) bool {
	window := math.MaxInt
	if e.pieceOf(o, window) < maxMessage {
		window = max(blockBytes/e.size, linkPiece)
	}
	from := o.phase * window
	for i := 1; i < e.size; i++ {
		src := (e.rank + e.size - i) % e.size
		if bytes := o.recvBytes[src] - from; bytes > 0 || bytes == 0 && o.First() {
			e.recvBytes(o, o.tag, o.recv+uintptr(o.recvOffsets[src]+from), min(bytes, window), src)
		}
	}
	for i := 1; i < e.size; i++ {
		dest := (e.rank + i) % e.size
		if bytes := o.sendBytes[dest] - from; bytes > 0 || bytes == 0 && o.First() {
			e.sendBytes(o, o.tag, o.send+uintptr(o.sendOffsets[dest]+from), min(bytes, window), dest)
		}
	}
	if bytes := o.recvBytes[e.rank]; bytes > 0 && o.First() {
		_ = e.wire.Flush() // an error recurs
		dst := o.recv + uintptr(o.recvOffsets[e.rank])
		src := o.send + uintptr(o.sendOffsets[e.rank])
		hostops.Copy(dst, src, bytes, false)
	}
	return o.inFlight == 0
}

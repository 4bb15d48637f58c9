package schedule

import (
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostops"
)

// Short collectives of ranks on one host use the shared-memory segment (see segment.go): every rank writes the data
// that the others need to its slot, and reads theirs. The small collectives of comm/local do the same with cells.

// sharedExchange plans a call that only moves data, and reports whether it uses the segment. Ranks that agree on the
// call agree on this.
func (p planner) sharedExchange() bool {
	c := p.c
	maxBytes := c.Bytes() // that a rank shares
	switch c.Op {
	case comm.OpScatter, comm.OpAllToAll:
		maxBytes *= p.size
	case comm.OpAllGatherV:
		maxBytes = slices.Max(c.RecvCounts) * c.DType.Size()
	case comm.OpAllToAllV:
		return false // a receiver does not know the sender's displacements
	}
	// From one rank to all, a copy by the library takes as long as two copies here.
	if !p.segment.fits(maxBytes) || c.Op.HasRoot() && maxBytes > treeLimit {
		return false
	}
	o := p.op(stepSharedExchange)
	o.round = sharedRound{active: true, maxBytes: maxBytes}
	for r := range p.size {
		if from, bytes, ok := p.sendPart(o, r); ok {
			o.round.bytes = max(o.round.bytes, int(from-c.Send)+bytes)
		}
		o.receives(r, 0, nothing)
		if to, bytes, ok := p.recvPart(o, r); ok {
			from, _, _ := c.SendPart(r, p.rank)
			o.sendOffsets[r] = int(from - c.Send)
			o.receives(r, int(to-c.Recv), bytes)
		}
	}
	p.add(o)
	return true
}

// stepSharedExchange copies every rank's part of recv, which begins at sendOffsets of that rank's slot.
func stepSharedExchange(e *Engine, o *Op) bool {
	if o.phase == 0 {
		e.segment.begin(o, o.round.bytes)
		return false
	}
	for r, bytes := range o.recvBytes {
		from := o.send
		if r != e.rank {
			from = e.segment.data(r, o.round.maxBytes)
		}
		hostops.Copy(o.recv+uintptr(o.recvOffsets[r]), from+uintptr(o.sendOffsets[r]), bytes, false)
	}
	return true
}

// stepSharedReduce reduces the data of all slots.
func stepSharedReduce(e *Engine, o *Op) bool {
	if o.phase == 0 {
		e.segment.begin(o, o.round.maxBytes)
		return false
	}
	if o.reduction.receives(e.rank) {
		for r := range o.srcs {
			o.srcs[r] = e.segment.data(r, o.round.maxBytes)
		}
		o.srcs[e.rank] = o.send
		o.dst[0] = o.recv
		hostops.Reduce(o.dst[:1], o.srcs, o.reduction.total, o.dt, o.reduce, o.streams())
	}
	return true
}

// stepSharedBarrier is a barrier of two rounds, for the same reason that [stepBarrier] has two halves.
func stepSharedBarrier(e *Engine, o *Op) bool {
	if o.phase == 2 {
		return true
	}
	e.segment.begin(o, 0)
	return false
}

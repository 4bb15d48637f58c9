package mpi

import (
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostops"
)

// Small collectives of ranks on one host do not go through MPI, but over the board (see
// board.go): every rank tells what the others need of it, and takes from the others'
// pages what it needs. (comm/local does the same with its cells.)

// smallExchange plans a call that only moves data, and reports whether it is a small
// one. Ranks that agree on the call agree on that.
func (p planner) smallExchange() bool {
	c := p.c
	most := c.Bytes() // that a rank tells
	switch c.Op {
	case comm.OpScatter, comm.OpAllToAll:
		most *= p.size
	case comm.OpAllGatherV:
		most = slices.Max(c.RecvCounts) * c.DType.Size()
	case comm.OpAllToAllV:
		return false // who receives does not know where the sender has it
	}
	if !p.board.fits(most) {
		return false
	}
	o := p.op(stepSmallExchange)
	for r := range p.size {
		if from, bytes, ok := c.SendPart(p.rank, r); ok {
			o.tells = max(o.tells, int(from-c.Send)+bytes)
		}
		o.receives(r, 0, nothing)
		if to, bytes, ok := c.RecvPart(p.rank, r); ok {
			from, _, _ := c.SendPart(r, p.rank)
			o.sendAt[r] = int(from - c.Send)
			o.receives(r, int(to-c.Recv), bytes)
		}
	}
	o.small, o.most = true, most
	o.reads = spanOf(o.send, o.tells)
	o.writes = spanOf(o.recv, extent(o.recvAt, o.recvBytes))
	p.add(o)
	return true
}

// stepSmallExchange takes every rank's part of recv from that rank's page.
func stepSmallExchange(e *endpoint, o *op) (bool, error) {
	if o.phase == 0 {
		e.board.tell(o, o.tells)
		return false, nil
	}
	for r, bytes := range o.recvBytes {
		from := e.board.data(r, o.most) + uintptr(o.sendAt[r])
		if r == e.rank {
			from = o.send + uintptr(o.sendAt[r])
		}
		hostops.Copy(o.recv+uintptr(o.recvAt[r]), from, bytes, false)
	}
	return true, nil
}

// stepSmallReduce reduces what is on the pages.
func stepSmallReduce(e *endpoint, o *op) (bool, error) {
	if o.phase == 0 {
		e.board.tell(o, o.most)
		return false, nil
	}
	if o.to == everybody || o.to == e.rank {
		for r := range o.srcs {
			o.srcs[r] = e.board.data(r, o.most)
		}
		o.srcs[e.rank] = o.send
		o.dst[0] = o.recv
		hostops.Reduce(o.dst[:], o.srcs, o.total, o.dt, o.reduce, false)
	}
	return true, nil
}

// stepSmallBarrier is a barrier of two rounds, as stepBarrier.
func stepSmallBarrier(e *endpoint, o *op) (bool, error) {
	if o.phase == 2 {
		return true, nil
	}
	e.board.tell(o, 0)
	return false, nil
}

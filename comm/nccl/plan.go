package nccl

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// nativeCall is a call of the library, ready to be made: its arguments but the
// last two, which are the communicator and the stream in every call that moves
// data.
type nativeCall struct {
	fn    dl.Func
	args  [maxArgs + 2]uintptr
	count int
}

// maxArgs is how many arguments ncclReduce has, which has most, before the
// last two.
const maxArgs = 6

// plan is what one submission consists of.
type plan []nativeCall

func (p *plan) add(fn dl.Func, args ...uintptr) {
	n := nativeCall{fn: fn}
	n.count = copy(n.args[:maxArgs], args)
	*p = append(*p, n)
}

// addCall adds the native calls that a call consists of: one where NCCL has such
// a collective, otherwise messages. What moves nothing is left out, on every
// rank. Where nothing is computed elements travel as bytes, so that every type can
// be moved.
func (c *Comm) addCall(x *comm.Call) {
	sym, p, rank := &c.lib.sym, &c.plan, c.Rank()
	size, bytes, isRoot := x.DType.Size(), x.Bytes(), rank == x.Peer
	send := func(buf uintptr, bytes, dest int) {
		if bytes > 0 {
			p.add(sym.Send, buf, uintptr(bytes), nativeByte, uintptr(dest))
		}
	}
	recv := func(buf uintptr, bytes, src int) {
		if bytes > 0 {
			p.add(sym.Recv, buf, uintptr(bytes), nativeByte, uintptr(src))
		}
	}
	if x.Count == 0 && x.RecvCounts == nil {
		return
	}
	elements, length, root := uintptr(x.Count), uintptr(bytes), uintptr(x.Peer)
	switch x.Op {
	case comm.OpAllReduce:
		p.add(sym.AllReduce, x.Send, x.Recv, elements, nativeType(x.DType), c.nativeOp(x.Reduce))
	case comm.OpReduce:
		p.add(sym.Reduce, x.Send, x.Recv, elements, nativeType(x.DType), c.nativeOp(x.Reduce), root)
	case comm.OpReduceScatter:
		p.add(sym.ReduceScatter, x.Send, x.Recv, elements, nativeType(x.DType), c.nativeOp(x.Reduce))
	case comm.OpBroadcast:
		p.add(sym.Broadcast, x.Send, x.Recv, length, nativeByte, root)
	case comm.OpAllGather:
		p.add(sym.AllGather, x.Send, x.Recv, length, nativeByte)
	case comm.OpSend:
		send(x.Send, bytes, x.Peer)
	case comm.OpRecv:
		recv(x.Recv, bytes, x.Peer)
	case comm.OpAllToAll:
		if sym.AllToAll.Found() {
			p.add(sym.AllToAll, x.Send, x.Recv, length, nativeByte)
			return
		}
		for r := range c.WorldSize() {
			send(x.Send+uintptr(r*bytes), bytes, r)
			recv(x.Recv+uintptr(r*bytes), bytes, r)
		}
	case comm.OpAllToAllV:
		for r := range c.WorldSize() {
			send(x.Send+uintptr(x.SendDispls[r]*size), x.SendCounts[r]*size, r)
			recv(x.Recv+uintptr(x.RecvDispls[r]*size), x.RecvCounts[r]*size, r)
		}
	case comm.OpAllGatherV:
		for r, n := range x.RecvCounts {
			to := x.Recv + uintptr(x.RecvDispls[r]*size)
			if r == rank && to == x.Send {
				continue // in place
			}
			send(x.Send, x.RecvCounts[rank]*size, r)
			recv(to, n*size, r)
		}
	case comm.OpGather:
		switch {
		case sym.Gather.Found():
			p.add(sym.Gather, x.Send, x.Recv, length, nativeByte, root)
		case !isRoot:
			send(x.Send, bytes, x.Peer)
		default:
			c.eachPart(x.Recv, bytes, x.Send, recv, send)
		}
	case comm.OpScatter:
		switch {
		case sym.Scatter.Found():
			p.add(sym.Scatter, x.Send, x.Recv, length, nativeByte, root)
		case !isRoot:
			recv(x.Recv, bytes, x.Peer)
		default:
			c.eachPart(x.Send, bytes, x.Recv, send, recv)
		}
	}
}

// eachPart is what the root of a gather or scatter does: to move part r of whole
// from or to rank r, and its own part, unless that is in place, in a message to
// itself whose other side is opposite.
func (c *Comm) eachPart(whole uintptr, bytes int, own uintptr, move, opposite func(buf uintptr, bytes, peer int)) {
	for r := range c.WorldSize() {
		part := whole + uintptr(r*bytes)
		if r == c.Rank() {
			if part == own {
				continue
			}
			opposite(own, bytes, r)
		}
		move(part, bytes, r)
	}
}

// nativeOp returns the ncclRedOp_t of a reduction. The average of one rank is
// its sum: NCCL has a kernel of its own for averages of one rank, which in
// 2.28.3 leaves the last elements of some lengths unwritten.
func (c *Comm) nativeOp(op comm.ReduceOp) uintptr {
	if c.WorldSize() == 1 && op == comm.Avg {
		op = comm.Sum
	}
	return opTable[op]
}

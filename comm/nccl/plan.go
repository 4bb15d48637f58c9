package nccl

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// nativeCall is a call of the library without its last two arguments, the communicator and the stream, which all calls
// that move data have.
type nativeCall struct {
	fn    dl.Func              // such as ncclAllReduce
	args  [maxArgs + 2]uintptr // the first count are set
	count int                  // arguments
}

// maxArgs is the largest number of arguments before the last two, which ncclReduce has.
const maxArgs = 6

// plan is the native calls of one submission.
type plan []nativeCall

func (p *plan) add(fn dl.Func, args ...uintptr) {
	n := nativeCall{fn: fn}
	n.count = copy(n.args[:maxArgs], args)
	*p = append(*p, n)
}

// addCall adds the native calls of a call: one if NCCL has such a collective, otherwise messages. Calls that move
// nothing are left out, on all ranks. Calls that compute nothing move bytes, so that every type can be moved.
func (c *Comm) addCall(x *comm.Call) {
	if x.Count == 0 && x.RecvCounts == nil {
		return
	}
	sym := &c.lib.sym
	p := &c.plan
	elements := uintptr(x.Count)
	length := uintptr(x.Bytes())
	root := uintptr(x.Peer)
	switch op := x.Op; {
	case op == comm.OpAllReduce:
		p.add(sym.AllReduce, x.Send, x.Recv, elements, typeTable[x.DType], c.nativeOp(x.Reduce))
	case op == comm.OpReduce:
		p.add(sym.Reduce, x.Send, x.Recv, elements, typeTable[x.DType], c.nativeOp(x.Reduce), root)
	case op == comm.OpReduceScatter:
		p.add(sym.ReduceScatter, x.Send, x.Recv, elements, typeTable[x.DType], c.nativeOp(x.Reduce))
	case op == comm.OpBroadcast:
		p.add(sym.Broadcast, x.Send, x.Recv, length, nativeByte, root)
	case op == comm.OpAllGather:
		p.add(sym.AllGather, x.Send, x.Recv, length, nativeByte)
	case op == comm.OpAllToAll && sym.AllToAll.Found():
		p.add(sym.AllToAll, x.Send, x.Recv, length, nativeByte)
	case op == comm.OpGather && sym.Gather.Found():
		p.add(sym.Gather, x.Send, x.Recv, length, nativeByte, root)
	case op == comm.OpScatter && sym.Scatter.Found():
		p.add(sym.Scatter, x.Send, x.Recv, length, nativeByte, root)
	default:
		c.addMessages(x)
	}
}

// addMessages adds the messages of a call, except empty ones and a rank's message to itself that is in place.
func (c *Comm) addMessages(x *comm.Call) {
	sym := &c.lib.sym
	p := &c.plan
	rank := c.Rank()
	for r := range c.WorldSize() {
		from, sent, sends := x.SendPart(rank, r)
		to, received, receives := x.RecvPart(rank, r)
		if sends && receives && r == rank && from == to {
			continue
		}
		if sends && sent > 0 {
			p.add(sym.Send, from, uintptr(sent), nativeByte, uintptr(r))
		}
		if receives && received > 0 {
			p.add(sym.Recv, to, uintptr(received), nativeByte, uintptr(r))
		}
	}
}

// nativeOp returns the ncclRedOp_t of a reduction. The average of one rank is
// its sum: NCCL's kernel for averages of one rank leaves the last elements of some lengths
// unwritten (2.28.3).
func (c *Comm) nativeOp(op comm.ReduceOp) uintptr {
	if c.WorldSize() == 1 && op == comm.Avg {
		op = comm.Sum
	}
	return opTable[op]
}

package mpi

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// Native collectives are the library's own non-blocking ones, on the communicator that users
// see. The network may reduce, and a CUDA-aware library takes device memory. In return,
// reductions are combined in the library's order, and are limited to those that MPI
// defines. With interop a rank may be any MPI program that calls the same MPI_I… functions.

// invocation is a call of an MPI function that starts a collective. Its last
// argument is the request, which is known when it starts.
type invocation struct {
	f    dl.Func
	args [10]uintptr // MPI_Ialltoallv has most of them
	n    int         // of them, without the request
}

// stepNative starts the collective.
func stepNative(e *endpoint, o *op) (bool, error) {
	if o.phase == 1 {
		return true, nil
	}
	slot, err := e.table.add(e.lib, o, everybody, sent)
	if err == nil {
		i := &o.native
		i.args[i.n] = slot
		e.table.calls.Add(i.f, i.args[:i.n+1]...)
	}
	return false, err
}

// collective is an MPI collective in its two forms.
type collective struct {
	small, large dl.Func // with counts of type int, MPI_Count
}

// collectiveOf returns the functions for a call.
func (l *library) collectiveOf(op comm.Op) collective {
	switch op {
	case comm.OpAllReduce:
		return collective{l.Iallreduce, l.IallreduceC}
	case comm.OpReduce:
		return collective{l.Ireduce, l.IreduceC}
	case comm.OpReduceScatter:
		return collective{l.IreduceScatterBlock, l.IreduceScatterBlockC}
	case comm.OpBroadcast:
		return collective{l.Ibcast, l.IbcastC}
	case comm.OpAllGather:
		return collective{l.Iallgather, l.IallgatherC}
	case comm.OpAllGatherV:
		return collective{l.Iallgatherv, l.IallgathervC}
	case comm.OpAllToAll:
		return collective{l.Ialltoall, l.IalltoallC}
	case comm.OpAllToAllV:
		return collective{l.Ialltoallv, l.IalltoallvC}
	case comm.OpGather:
		return collective{l.Igather, l.IgatherC}
	default:
		return collective{l.Iscatter, l.IscatterC}
	}
}

// largest is the largest number that goes into an int argument of a call.
func largest(c *comm.Call) int {
	n := c.Count
	for _, list := range [...][]int{c.SendCounts, c.SendDispls, c.RecvCounts, c.RecvDispls} {
		for _, x := range list {
			n = max(n, x)
		}
	}
	return n
}

// nativeAccepts returns why the library has no collective for a call, if so.
func (e *endpoint) nativeAccepts(c *comm.Call) error {
	if c.Op.Message() {
		return nil
	}
	if n, mpi := largest(c), e.lib.collectiveOf(c.Op); n > math.MaxInt32 && !mpi.large.Found() {
		return fmt.Errorf("%w: %d elements in one %s; this library counts to 2^31-1", comm.ErrUnsupported, n, mpi.small.Name())
	}
	if c.Op == comm.OpReduceScatter && spanOf(c.Send, e.size*c.Bytes()).overlaps(spanOf(c.Recv, c.Bytes())) {
		return fmt.Errorf("%w: in place; MPI's in-place form puts the result elsewhere", comm.ErrUnsupported)
	}
	return nil
}

// native plans a collective of the library.
func (p planner) native() {
	c, l, o := p.c, p.lib, p.op(stepNative)
	mpi, wide := l.collectiveOf(c.Op), largest(c) > math.MaxInt32
	o.external, o.native = true, invocation{f: mpi.small}
	if wide {
		o.native.f = mpi.large
	}
	send, recv := c.Send, c.Recv
	n, t, root := uintptr(c.Count), l.typeOf(c.DType), uintptr(c.Peer)
	size, bytes := c.DType.Size(), c.Bytes()
	atRoot := p.rank == c.Peer
	switch c.Op {
	case comm.OpAllReduce:
		o.reads, o.writes = spanOf(send, bytes), spanOf(recv, bytes)
		o.native.pass(l.orInPlace(send, send == recv), recv, n, t, l.nativeReduce(c.DType, c.Reduce))
	case comm.OpReduce:
		o.reads, o.writes = spanOf(send, bytes), spanAt(atRoot, recv, bytes)
		o.native.pass(l.orInPlace(send, atRoot && send == recv), recv, n, t, l.nativeReduce(c.DType, c.Reduce), root)
	case comm.OpReduceScatter:
		o.reads, o.writes = spanOf(send, p.size*bytes), spanOf(recv, bytes)
		o.native.pass(send, recv, n, t, l.nativeReduce(c.DType, c.Reduce))
	case comm.OpBroadcast:
		o.writes = spanOf(recv, bytes)
		o.native.pass(recv, n, t, root)
	case comm.OpAllGather:
		o.reads, o.writes = spanOf(send, bytes), spanOf(recv, p.size*bytes)
		o.native.pass(l.orInPlace(send, send == recv+uintptr(p.rank*bytes)), n, t, recv, n, t)
	case comm.OpAllGatherV:
		own := c.RecvCounts[p.rank]
		o.reads, o.writes = spanOf(send, own*size), spanOf(recv, extent(c.RecvDispls, c.RecvCounts)*size)
		o.native.pass(l.orInPlace(send, send == recv+uintptr(c.RecvDispls[p.rank]*size)), uintptr(own), t,
			recv, o.vector(0, c.RecvCounts, wide), o.vector(1, c.RecvDispls, wide), t)
	case comm.OpAllToAll:
		o.reads, o.writes = spanOf(send, p.size*bytes), spanOf(recv, p.size*bytes)
		o.native.pass(send, n, t, recv, n, t)
	case comm.OpAllToAllV:
		o.reads, o.writes = spanOf(send, extent(c.SendDispls, c.SendCounts)*size), spanOf(recv, extent(c.RecvDispls, c.RecvCounts)*size)
		o.native.pass(send, o.vector(0, c.SendCounts, wide), o.vector(1, c.SendDispls, wide), t,
			recv, o.vector(2, c.RecvCounts, wide), o.vector(3, c.RecvDispls, wide), t)
	case comm.OpGather:
		o.reads, o.writes = spanOf(send, bytes), spanAt(atRoot, recv, p.size*bytes)
		o.native.pass(l.orInPlace(send, atRoot && send == recv+uintptr(c.Peer*bytes)), n, t, recv, n, t, root)
	case comm.OpScatter:
		o.reads, o.writes = spanAt(atRoot, send, p.size*bytes), spanOf(recv, bytes)
		o.native.pass(send, n, t, l.orInPlace(recv, atRoot && recv == send+uintptr(c.Peer*bytes)), n, t, root)
	}
	o.native.pass(p.pub)
	p.add(o)
}

// pass appends arguments.
func (i *invocation) pass(args ...uintptr) { i.n += copy(i.args[i.n:], args) }

// spanAt is a span that only the root uses.
func spanAt(root bool, address uintptr, bytes int) span {
	if !root {
		return span{}
	}
	return spanOf(address, bytes)
}

// nativeSupports says which reductions MPI defines on its own types: no
// averages, and nothing on floats of 16 and 8 bits.
func nativeSupports(dt dtype.DType, red comm.ReduceOp) error {
	if red == comm.Avg || dt.IsFloat() && dt.Size() < 4 {
		return fmt.Errorf("%w: MPI has no %v of %v; it works without native collectives", comm.ErrUnsupported, red, dt)
	}
	return nil
}

// nativeReduce returns MPI's handle of a reduction.
func (l *library) nativeReduce(dt dtype.DType, red dtype.ReduceOp) uintptr {
	if dt == dtype.Bool {
		return l.handles.ops[boolOps[red]]
	}
	return l.handles.ops[numberOps[red]]
}

var (
	numberOps = [...]int{dtype.Sum: opSum, dtype.Prod: opProd, dtype.Min: opMin, dtype.Max: opMax}
	boolOps   = [...]int{dtype.Sum: opOr, dtype.Prod: opAnd, dtype.Min: opAnd, dtype.Max: opOr}
)

// orInPlace is the send argument of a collective.
func (l *library) orInPlace(buffer uintptr, inPlace bool) uintptr {
	if inPlace {
		return l.abi.inPlace
	}
	return buffer
}

// vector stores numbers as MPI wants them (int, or MPI_Count and MPI_Aint) in
// the i-th of four arrays that belong to o, and returns the array's address.
func (o *op) vector(i int, numbers []int, wide bool) uintptr {
	const width = 8
	n := len(numbers)
	if o.vectors == 0 {
		var err error
		if o.vectors, err = host.Allocate(4 * width * n); err != nil {
			panic("mpi: " + err.Error()) // a few bytes per rank
		}
	}
	address := o.vectors + uintptr(i*width*n)
	if wide {
		for r, x := range numbers {
			hostmem.Slice[int64](address, n)[r] = int64(x)
		}
		return address
	}
	for r, x := range numbers {
		hostmem.Slice[int32](address, n)[r] = int32(x)
	}
	return address
}

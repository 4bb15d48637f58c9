package mpi

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/reductions"
)

// Native collectives are the library's own non-blocking ones, on the communicator that users
// see. The network may reduce, and a CUDA-aware library takes device memory. In return,
// reductions are combined in the library's order, and are limited to those that MPI
// defines.

// invocation is a call of an MPI function that starts a collective. Its last argument is the
// request, which is known when it starts.
type invocation struct {
	f       dl.Func     // of the collective, with int or MPI_Count counts
	args    [10]uintptr // MPI_Ialltoallv has most of them
	n       int         // of them, without the request
	vectors []int64     // counts and displacements
}

// Accepts implements [schedule.Offload].
func (e *endpoint) Accepts(c comm.Call) error {
	if c.Op.Message() {
		return nil
	}
	if n, mpi := largest(&c), e.lib.functionOf(c.Op); n > math.MaxInt32 && !mpi.large.Found() {
		return fmt.Errorf("%w: %d elements in one %s; this library counts to 2^31-1",
			comm.ErrUnsupported, n, mpi.small.Name())
	}
	if bytes := uintptr(c.Bytes()); c.Op == comm.OpReduceScatter && c.Send < c.Recv+bytes &&
		c.Recv < c.Send+uintptr(e.size)*bytes {
		return fmt.Errorf("%w: in place; MPI's in-place form puts the result elsewhere", comm.ErrUnsupported)
	}
	if e.lib.cuda && e.lib.miscompares(c) { // the schedules, which do it otherwise, do not reach device memory
		return fmt.Errorf("%w: %v of %v: this library compares unsigned integers as signed ones",
			comm.ErrUnsupported, c.Reduce, c.DType)
	}
	return nil
}

// startNative is the [schedule.Step] of an invocation.
func (e *endpoint) startNative(_ *schedule.Engine, o *schedule.Op) (done bool) {
	if !o.First() {
		return true
	}
	i := o.Extra.(*invocation)
	if slot, ok := e.table.add(e.Expect(o, schedule.Message{}), false); ok {
		i.args[i.n] = slot
		e.table.calls.Add(i.f, i.args[:i.n+1]...)
	}
	return false
}

// function is an MPI function in its two forms.
type function struct {
	small, large dl.Func // with counts of type int, MPI_Count
}

// functionOf returns the functions for a call.
func (l *library) functionOf(op comm.Op) function {
	return [...]function{
		comm.OpAllReduce:     {l.Iallreduce, l.IallreduceC},
		comm.OpReduce:        {l.Ireduce, l.IreduceC},
		comm.OpReduceScatter: {l.IreduceScatterBlock, l.IreduceScatterBlockC},
		comm.OpBroadcast:     {l.Ibcast, l.IbcastC},
		comm.OpAllGather:     {l.Iallgather, l.IallgatherC},
		comm.OpAllGatherV:    {l.Iallgatherv, l.IallgathervC},
		comm.OpAllToAll:      {l.Ialltoall, l.IalltoallC},
		comm.OpAllToAllV:     {l.Ialltoallv, l.IalltoallvC},
		comm.OpGather:        {l.Igather, l.IgatherC},
		comm.OpScatter:       {l.Iscatter, l.IscatterC},
	}[op]
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

// Plan implements [schedule.Offload]: collectives are the library's, messages and barriers are not, and neither are
// reductions that the library does wrongly.
func (e *endpoint) Plan(o *schedule.Op, c comm.Call) bool {
	if c.Op.Message() || !c.Op.MovesData() || e.lib.miscompares(c) {
		return false
	}
	if o.Extra == nil {
		o.Extra = new(invocation)
	}
	l := e.lib
	i := o.Extra.(*invocation)
	mpi := l.functionOf(c.Op)
	wide := largest(&c) > math.MaxInt32
	*i = invocation{f: mpi.small, vectors: i.vectors}
	o.Step = e.nativeStep
	o.External = true
	if wide {
		i.f = mpi.large
	}
	send := c.Send
	recv := c.Recv
	n := uintptr(c.Count)
	t := l.handles.types[c.DType]
	root := uintptr(c.Peer)
	size := c.DType.Size()
	bytes := c.Bytes()
	atRoot := e.rank == c.Peer
	switch c.Op {
	case comm.OpAllReduce:
		i.pass(
			l.orInPlace(send, send == recv),
			recv,
			n,
			t,
			l.nativeReduce(c.DType, c.Reduce),
		)
	case comm.OpReduce:
		i.pass(
			l.orInPlace(send, atRoot && send == recv),
			recv,
			n,
			t,
			l.nativeReduce(c.DType, c.Reduce),
			root,
		)
	case comm.OpReduceScatter:
		i.pass(send, recv, n, t, l.nativeReduce(c.DType, c.Reduce))
	case comm.OpBroadcast:
		i.pass(recv, n, t, root)
	case comm.OpAllGather:
		i.pass(l.orInPlace(send, send == recv+uintptr(e.rank*bytes)), n, t, recv, n, t)
	case comm.OpAllGatherV:
		count := c.RecvCounts[e.rank]
		i.pass(l.orInPlace(send, send == recv+uintptr(c.RecvDispls[e.rank]*size)), uintptr(count), t,
			recv, i.vector(0, c.RecvCounts, wide), i.vector(1, c.RecvDispls, wide), t)
	case comm.OpAllToAll:
		i.pass(send, n, t, recv, n, t)
	case comm.OpAllToAllV:
		i.pass(send, i.vector(0, c.SendCounts, wide), i.vector(1, c.SendDispls, wide), t,
			recv, i.vector(2, c.RecvCounts, wide), i.vector(3, c.RecvDispls, wide), t)
	case comm.OpGather:
		i.pass(l.orInPlace(send, atRoot && send == recv+uintptr(c.Peer*bytes)), n, t, recv, n, t, root)
	case comm.OpScatter:
		i.pass(send, n, t, l.orInPlace(recv, atRoot && recv == send+uintptr(c.Peer*bytes)), n, t, root)
	}
	i.pass(e.handle)
	return true
}

// pass appends arguments.
func (i *invocation) pass(args ...uintptr) {
	i.n += copy(i.args[i.n:], args)
}

// nativeSupports says which reductions MPI defines on its own types: no
// averages, and nothing on floats of 16 and 8 bits.
func nativeSupports(dt dtype.DType, red comm.ReduceOp) error {
	if red == comm.Avg || dt.IsFloat() && dt.Size() < 4 {
		return fmt.Errorf("%w: MPI has no %v of %v; it works without native collectives", comm.ErrUnsupported, red, dt)
	}
	return nil
}

// comparesSigned reports whether the library's Max says that a byte of 1 is more than one of 128, as MPICH 4.0's
// does for all unsigned types. memory has room for two words.
func (l *library) comparesSigned(memory cells) (bool, error) {
	in := hostmem.Slice[byte](memory.addr(0), 1)
	result := hostmem.Slice[byte](memory.addr(1), 1)
	in[0] = 128
	result[0] = 1
	err := l.must(
		l.ReduceLocal,
		memory.addr(0),
		memory.addr(1),
		1,
		l.handles.types[dtype.U8],
		l.handles.ops[comm.Max],
	)
	return result[0] != 128, err
}

// miscompares reports whether the library would do a reduction wrongly.
func (l *library) miscompares(c comm.Call) bool {
	if !l.signed || !c.Op.Reduces() || c.Reduce != comm.Max && c.Reduce != comm.Min {
		return false
	}
	switch c.DType {
	case dtype.U8, dtype.U16, dtype.U32, dtype.U64:
		return true
	}
	return false
}

// nativeReduce returns MPI's handle of a reduction.
func (l *library) nativeReduce(dt dtype.DType, red reductions.Op) uintptr {
	if dt == dtype.Bool {
		return l.handles.boolOps[red]
	}
	return l.handles.ops[red]
}

// orInPlace is the send argument of a collective.
func (l *library) orInPlace(buffer uintptr, inPlace bool) uintptr {
	if inPlace {
		return l.abi.inPlace
	}
	return buffer
}

// vector stores numbers as MPI wants them (int, or MPI_Count and MPI_Aint) in
// the j-th of four arrays that belong to i, and returns the array's address.
func (i *invocation) vector(j int, numbers []int, wide bool) uintptr {
	n := len(numbers)
	if i.vectors == nil {
		i.vectors = make([]int64, 4*n)
	}
	address := hostmem.Addr(i.vectors[j*n:])
	for r, x := range numbers {
		if wide {
			hostmem.Slice[int64](address, n)[r] = int64(x)
		} else {
			hostmem.Slice[int32](address, n)[r] = int32(x)
		}
	}
	return address
}

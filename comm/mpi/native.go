package mpi

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// Native collectives are the library's own non-blocking ones. A rank may then
// be any MPI program that calls the same MPI_I… functions, the network may
// reduce, and a CUDA-aware library takes device memory. In return, reductions
// are combined in whatever order the library likes, and are limited to what
// MPI defines.

// call is an MPI function that starts a collective, with its arguments. The
// last is the request, which is known when it starts.
type call struct {
	function string
	f        dl.Func
	args     [10]uintptr // MPI_Ialltoallv has most of them
	n        int         // of them, without the request
}

// stepNative starts the collective.
func stepNative(e *engine, o *op) (bool, error) {
	if o.phase == 1 {
		return true, nil
	}
	o.call.args[o.call.n] = e.table.add(o, sent)
	code := e.lib.call(o.call.f, o.call.args[:o.call.n+1]...)
	return false, e.table.posted(e.lib, o.call.function, code)
}

// collective is an MPI collective in its two forms.
type collective struct {
	function     string
	small, large dl.Func // with counts of type int, MPI_Count
}

// nativeOp prepares a native collective. count is the largest number that goes
// into one of its int arguments.
func (c *communicator) nativeOp(name string, mpi collective, count int, args ...uintptr) (*op, error) {
	f := mpi.small
	if count > math.MaxInt32 {
		if f = mpi.large; !f.Found() {
			return nil, c.group.Refuse(c.check.Fail(name, fmt.Errorf("%w: %d elements in one %s; this library counts to 2^31-1",
				comm.ErrUnsupported, count, mpi.function)))
		}
	}
	if err := c.enter(name); err != nil {
		return nil, err
	}
	o := c.newOp()
	o.name, o.step = name, stepNative
	o.call.function, o.call.f, o.call.n = mpi.function, f, len(args)
	copy(o.call.args[:], args)
	return o, nil
}

// submit adds an operation that reads and writes the given memory.
func (c *communicator) submit(o *op, reads, writes span) error {
	o.reads, o.writes = reads, writes
	c.add(o)
	return c.leave()
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

func (c *communicator) nativeAllReduce(send, recv uintptr, count int, dt dtype.DType, red dtype.ReduceOp) error {
	l := c.lib
	o, err := c.nativeOp("allreduce", collective{"MPI_Iallreduce", l.Iallreduce, l.IallreduceC}, count,
		l.orInPlace(send, send == recv), recv, uintptr(count), l.typeOf(dt), l.nativeReduce(dt, red), c.pub)
	if err != nil {
		return err
	}
	return c.submit(o, spanOf(send, count*dt.Size()), spanOf(recv, count*dt.Size()))
}

func (c *communicator) nativeReduceTo(send, recv uintptr, count int, dt dtype.DType, red dtype.ReduceOp, root int) error {
	l := c.lib
	atRoot := c.rank == root
	o, err := c.nativeOp("reduce", collective{"MPI_Ireduce", l.Ireduce, l.IreduceC}, count,
		l.orInPlace(send, atRoot && send == recv), recv, uintptr(count), l.typeOf(dt), l.nativeReduce(dt, red), uintptr(root), c.pub)
	if err != nil {
		return err
	}
	return c.submit(o, spanOf(send, count*dt.Size()), spanAt(atRoot, recv, count*dt.Size()))
}

// spanAt is a span that only the root uses.
func spanAt(root bool, address uintptr, bytes int) span {
	if !root {
		return span{}
	}
	return spanOf(address, bytes)
}

func (c *communicator) nativeReduceScatter(send, recv uintptr, count int, dt dtype.DType, red dtype.ReduceOp) error {
	const name = "reducescatter"
	l := c.lib
	bytes := count * dt.Size()
	reads, writes := spanOf(send, c.size*bytes), spanOf(recv, bytes)
	if reads.overlaps(writes) {
		return c.group.Refuse(c.check.Fail(name, fmt.Errorf(
			"%w: in place; MPI's in-place form puts the result elsewhere", comm.ErrUnsupported)))
	}
	o, err := c.nativeOp(name, collective{"MPI_Ireduce_scatter_block", l.IreduceScatterBlock, l.IreduceScatterBlockC}, count,
		send, recv, uintptr(count), l.typeOf(dt), l.nativeReduce(dt, red), c.pub)
	if err != nil {
		return err
	}
	return c.submit(o, reads, writes)
}

func (c *communicator) nativeBroadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	l := c.lib
	o, err := c.nativeOp("broadcast", collective{"MPI_Ibcast", l.Ibcast, l.IbcastC}, count,
		buf, uintptr(count), l.typeOf(dt), uintptr(root), c.pub)
	if err != nil {
		return err
	}
	return c.submit(o, span{}, spanOf(buf, count*dt.Size()))
}

func (c *communicator) nativeAllGather(send, recv uintptr, count int, dt dtype.DType) error {
	l := c.lib
	bytes := count * dt.Size()
	o, err := c.nativeOp("allgather", collective{"MPI_Iallgather", l.Iallgather, l.IallgatherC}, count,
		l.orInPlace(send, send == recv+uintptr(c.rank*bytes)), uintptr(count), l.typeOf(dt),
		recv, uintptr(count), l.typeOf(dt), c.pub)
	if err != nil {
		return err
	}
	return c.submit(o, spanOf(send, bytes), spanOf(recv, c.size*bytes))
}

func (c *communicator) nativeAllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	l := c.lib
	o, err := c.nativeOp("alltoall", collective{"MPI_Ialltoall", l.Ialltoall, l.IalltoallC}, count,
		send, uintptr(count), l.typeOf(dt), recv, uintptr(count), l.typeOf(dt), c.pub)
	if err != nil {
		return err
	}
	bytes := c.size * count * dt.Size()
	return c.submit(o, spanOf(send, bytes), spanOf(recv, bytes))
}

func (c *communicator) nativeGather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	l := c.lib
	bytes := count * dt.Size()
	atRoot := c.rank == root
	o, err := c.nativeOp("gather", collective{"MPI_Igather", l.Igather, l.IgatherC}, count,
		l.orInPlace(send, atRoot && send == recv+uintptr(root*bytes)), uintptr(count), l.typeOf(dt),
		recv, uintptr(count), l.typeOf(dt), uintptr(root), c.pub)
	if err != nil {
		return err
	}
	return c.submit(o, spanOf(send, bytes), spanAt(atRoot, recv, c.size*bytes))
}

func (c *communicator) nativeScatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	l := c.lib
	bytes := count * dt.Size()
	atRoot := c.rank == root
	o, err := c.nativeOp("scatter", collective{"MPI_Iscatter", l.Iscatter, l.IscatterC}, count,
		send, uintptr(count), l.typeOf(dt),
		l.orInPlace(recv, atRoot && recv == send+uintptr(root*bytes)), uintptr(count), l.typeOf(dt), uintptr(root), c.pub)
	if err != nil {
		return err
	}
	return c.submit(o, spanAt(atRoot, send, c.size*bytes), spanOf(recv, bytes))
}

func (c *communicator) nativeAllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	l := c.lib
	largest := largestOf(counts, displs)
	own := send == recv+uintptr(displs[c.rank]*dt.Size())
	o, err := c.nativeOp("allgatherv", collective{"MPI_Iallgatherv", l.Iallgatherv, l.IallgathervC}, largest,
		l.orInPlace(send, own), uintptr(counts[c.rank]), l.typeOf(dt), recv, 0, 0, l.typeOf(dt), c.pub)
	if err != nil {
		return err
	}
	wide := largest > math.MaxInt32
	o.call.args[4] = o.vector(0, counts, wide)
	o.call.args[5] = o.vector(1, displs, wide)
	return c.submit(o, spanOf(send, counts[c.rank]*dt.Size()), spanOf(recv, extent(displs, counts)*dt.Size()))
}

func (c *communicator) nativeAllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	l := c.lib
	largest := largestOf(sendCounts, sendDispls, recvCounts, recvDispls)
	o, err := c.nativeOp("alltoallv", collective{"MPI_Ialltoallv", l.Ialltoallv, l.IalltoallvC}, largest,
		send, 0, 0, l.typeOf(dt), recv, 0, 0, l.typeOf(dt), c.pub)
	if err != nil {
		return err
	}
	wide := largest > math.MaxInt32
	o.call.args[1] = o.vector(0, sendCounts, wide)
	o.call.args[2] = o.vector(1, sendDispls, wide)
	o.call.args[5] = o.vector(2, recvCounts, wide)
	o.call.args[6] = o.vector(3, recvDispls, wide)
	return c.submit(o, spanOf(send, extent(sendDispls, sendCounts)*dt.Size()), spanOf(recv, extent(recvDispls, recvCounts)*dt.Size()))
}

func largestOf(lists ...[]int) int {
	largest := 0
	for _, list := range lists {
		for _, n := range list {
			largest = max(largest, n)
		}
	}
	return largest
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

package mpi

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// backend is what errors of this package name.
const backend = "mpi"

// communicator is a group of MPI processes.
type communicator struct {
	engine
	check  comm.Check
	group  group
	state  *state
	world  bool
	closed bool // guarded by engine.mu
}

var (
	_ comm.Communicator = (*communicator)(nil)
	_ comm.Reacher      = (*communicator)(nil)
)

// Rank returns this process's rank.
func (c *communicator) Rank() int { return c.rank }

// WorldSize returns the number of processes.
func (c *communicator) WorldSize() int { return c.size }

// enter locks the engine for a submission, unless the communicator cannot
// take one.
func (c *communicator) enter(name string) error {
	inside := c.group.Enter()
	c.mu.Lock()
	if err := c.usable(name); err != nil {
		c.mu.Unlock()
		return c.group.Refuse(err)
	}
	c.group.inside = inside
	return nil
}

// usable returns why the communicator takes no calls, if so.
func (c *communicator) usable(name string) error {
	switch {
	case c.closed:
		return c.check.Fail(name, comm.ErrClosed)
	case c.broken != nil:
		return c.check.Fail(name, c.stopped())
	}
	return nil
}

// add takes an operation: for the engine, or for the caller's group.
func (c *communicator) add(o *op) {
	if c.group.inside {
		c.group.ops = append(c.group.ops, o)
		return
	}
	c.enqueue(o, 0)
}

// leave starts what was added and unlocks the engine.
func (c *communicator) leave() error {
	defer c.mu.Unlock()
	if c.group.inside {
		return nil
	}
	c.state.progress.notify()
	return c.start()
}

// reduction fills in what all reductions have in common.
func (c *communicator) reduction(name string, send, recv uintptr, dt dtype.DType, red dtype.ReduceOp, peer int) *op {
	o := c.newOp()
	o.name, o.private = name, true
	o.send, o.recv, o.dt, o.red, o.peer = send, recv, dt, red, peer
	return o
}

// AllReduce implements [comm.Communicator].
func (c *communicator) AllReduce(send, recv uintptr, count int, dt dtype.DType, red comm.ReduceOp) error {
	if err := c.check.AllReduce(send, recv, count, dt, red); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeAllReduce(send, recv, count, dt, red)
	}
	return c.reduce("allreduce", send, recv, count, dt, red, everybody)
}

// Reduce implements [comm.Communicator].
func (c *communicator) Reduce(send, recv uintptr, count int, dt dtype.DType, red comm.ReduceOp, root int) error {
	if err := c.check.Reduce(send, recv, count, dt, red, root); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeReduceTo(send, recv, count, dt, red, root)
	}
	return c.reduce("reduce", send, recv, count, dt, red, root)
}

// reduce submits a reduction whose result goes to one rank or to everybody.
func (c *communicator) reduce(name string, send, recv uintptr, count int, dt dtype.DType, red dtype.ReduceOp, to int) error {
	if err := c.enter(name); err != nil {
		return err
	}
	size := dt.Size()
	mine := to == everybody || to == c.rank
	whole := count*size*(c.size-1) <= wholeLimit
	block := count
	if !whole {
		block = blockBytes / size
	}
	for from := 0; from < count; from += block {
		n := min(block, count-from)
		at := uintptr(from * size)
		o := c.reduction(name, send+at, recv+at, dt, red, to)
		o.total = n
		o.reads = spanOf(o.send, n*size)
		if mine {
			o.writes = spanOf(o.recv, n*size)
		}
		switch {
		case !whole:
			o.step = stepShares
			o.share = roundUp((n+c.size-1)/c.size, cacheLine)
			o.stride = o.share
			o.work = (c.size - 1) * roundUp(o.share*size, cacheLine)
		case mine:
			o.step = stepWhole
			o.work = (c.size - 1) * roundUp(n*size, cacheLine)
		default:
			o.step = stepWhole
		}
		c.add(o)
	}
	return c.leave()
}

// ReduceScatter implements [comm.Communicator].
func (c *communicator) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, red comm.ReduceOp) error {
	const name = "reducescatter"
	if err := c.check.ReduceScatter(send, recv, count, dt, red); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeReduceScatter(send, recv, count, dt, red)
	}
	if err := c.enter(name); err != nil {
		return err
	}
	size := dt.Size()
	block := max(1, blockBytes/size/c.size)
	for from := 0; from < count; from += block {
		n := min(block, count-from)
		at := uintptr(from * size)
		o := c.reduction(name, send+at, recv+at, dt, red, nobody)
		o.step = stepShares
		o.share, o.stride, o.total = n, count, n*c.size
		o.work = (c.size - 1) * roundUp(n*size, cacheLine)
		o.reads = spanOf(o.send, (o.stride*(c.size-1)+n)*size)
		o.writes = spanOf(o.recv, n*size)
		c.add(o)
	}
	return c.leave()
}

// movement fills in what all collectives that only move data have in common:
// nothing goes anywhere yet.
func (c *communicator) movement(name string, send, recv uintptr, dt dtype.DType) *op {
	o := c.newOp()
	o.name, o.private, o.step = name, true, stepExchange
	o.send, o.recv, o.dt = send, recv, dt
	clear(o.sendBytes)
	clear(o.recvBytes)
	return o
}

// exchange submits an operation after finding the memory that it uses.
func (c *communicator) exchange(o *op) error {
	o.reads = spanOf(o.send, extent(o.sendAt, o.sendBytes))
	o.writes = spanOf(o.recv, extent(o.recvAt, o.recvBytes))
	c.add(o)
	return c.leave()
}

// extent returns where the last part ends.
func extent(at, bytes []int) int {
	end := 0
	for r, n := range bytes {
		if n > 0 {
			end = max(end, at[r]+n)
		}
	}
	return end
}

// AllGather implements [comm.Communicator].
func (c *communicator) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	const name = "allgather"
	if err := c.check.AllGather(send, recv, count, dt); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeAllGather(send, recv, count, dt)
	}
	if err := c.enter(name); err != nil {
		return err
	}
	o := c.movement(name, send, recv, dt)
	bytes := count * dt.Size()
	for r := range c.size {
		o.sendAt[r], o.sendBytes[r] = 0, bytes
		o.recvAt[r], o.recvBytes[r] = r*bytes, bytes
	}
	return c.exchange(o)
}

// AllGatherV implements [comm.Communicator].
func (c *communicator) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	const name = "allgatherv"
	if err := c.check.AllGatherV(send, recv, counts, displs, dt); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeAllGatherV(send, recv, counts, displs, dt)
	}
	if err := c.enter(name); err != nil {
		return err
	}
	o := c.movement(name, send, recv, dt)
	size := dt.Size()
	for r := range c.size {
		o.sendAt[r], o.sendBytes[r] = 0, counts[c.rank]*size
		o.recvAt[r], o.recvBytes[r] = displs[r]*size, counts[r]*size
	}
	return c.exchange(o)
}

// AllToAll implements [comm.Communicator].
func (c *communicator) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	const name = "alltoall"
	if err := c.check.AllToAll(send, recv, count, dt); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeAllToAll(send, recv, count, dt)
	}
	if err := c.enter(name); err != nil {
		return err
	}
	o := c.movement(name, send, recv, dt)
	bytes := count * dt.Size()
	for r := range c.size {
		o.sendAt[r], o.sendBytes[r] = r*bytes, bytes
		o.recvAt[r], o.recvBytes[r] = r*bytes, bytes
	}
	return c.exchange(o)
}

// AllToAllV implements [comm.Communicator].
func (c *communicator) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	const name = "alltoallv"
	if err := c.check.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeAllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt)
	}
	if err := c.enter(name); err != nil {
		return err
	}
	o := c.movement(name, send, recv, dt)
	size := dt.Size()
	for r := range c.size {
		o.sendAt[r], o.sendBytes[r] = sendDispls[r]*size, sendCounts[r]*size
		o.recvAt[r], o.recvBytes[r] = recvDispls[r]*size, recvCounts[r]*size
	}
	return c.exchange(o)
}

// Gather implements [comm.Communicator].
func (c *communicator) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	const name = "gather"
	if err := c.check.Gather(send, recv, count, dt, root); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeGather(send, recv, count, dt, root)
	}
	if err := c.enter(name); err != nil {
		return err
	}
	o := c.movement(name, send, recv, dt)
	bytes := count * dt.Size()
	o.sendAt[root], o.sendBytes[root] = 0, bytes
	if c.rank == root {
		for r := range c.size {
			o.recvAt[r], o.recvBytes[r] = r*bytes, bytes
		}
	}
	return c.exchange(o)
}

// Scatter implements [comm.Communicator].
func (c *communicator) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	const name = "scatter"
	if err := c.check.Scatter(send, recv, count, dt, root); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeScatter(send, recv, count, dt, root)
	}
	if err := c.enter(name); err != nil {
		return err
	}
	o := c.movement(name, send, recv, dt)
	bytes := count * dt.Size()
	o.recvAt[root], o.recvBytes[root] = 0, bytes
	if c.rank == root {
		for r := range c.size {
			o.sendAt[r], o.sendBytes[r] = r*bytes, bytes
		}
	}
	return c.exchange(o)
}

// treeLimit is how many bytes are broadcast along a tree, which needs the
// fewest steps. Longer data is scattered and gathered by everybody, so that the
// root sends it about twice instead of once per branch (van de Geijn).
const treeLimit = 64 << 10

// Broadcast implements [comm.Communicator].
func (c *communicator) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	const name = "broadcast"
	if err := c.check.Broadcast(buf, count, dt, root); err != nil {
		return c.group.Refuse(err)
	}
	if c.native {
		return c.nativeBroadcast(buf, count, dt, root)
	}
	if err := c.enter(name); err != nil {
		return err
	}
	bytes := count * dt.Size()
	if c.size > 2 && bytes > treeLimit {
		return c.broadcastParts(buf, bytes, dt, root)
	}
	o := c.newOp()
	o.name, o.private, o.step = name, true, stepTree
	o.recv, o.total, o.dt, o.peer = buf, count, dt, root
	o.writes = spanOf(buf, bytes)
	c.add(o)
	return c.leave()
}

// broadcastParts broadcasts in two operations. The second waits for the first
// because it uses the same memory, in a group as well.
func (c *communicator) broadcastParts(buf uintptr, bytes int, dt dtype.DType, root int) error {
	part := roundUp((bytes+c.size-1)/c.size, cacheLine)
	length := func(r int) int { return max(0, min(part, bytes-r*part)) }

	scatter := c.movement("broadcast", buf, buf, dt)
	gather := c.movement("broadcast", buf, buf, dt)
	gather.chained = true
	for r := range c.size {
		if c.rank == root {
			scatter.sendAt[r], scatter.sendBytes[r] = r*part, length(r)
		}
		if r != root {
			gather.sendAt[r], gather.sendBytes[r] = c.rank*part, length(c.rank)
		}
		if c.rank != root {
			gather.recvAt[r], gather.recvBytes[r] = r*part, length(r)
		}
	}
	if c.rank != root {
		scatter.recvAt[root], scatter.recvBytes[root] = c.rank*part, length(c.rank)
	}
	for _, o := range []*op{scatter, gather} {
		// A rank keeps its own part where it is.
		o.sendBytes[c.rank], o.recvBytes[c.rank] = 0, 0
		o.writes = spanOf(buf, bytes)
		c.add(o)
	}
	return c.leave()
}

// Send implements [comm.Communicator]. The message is one MPI message of the
// elements' type, so the receiver may be any MPI program.
func (c *communicator) Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
	if err := c.check.Send(buf, count, dt, dest); err != nil {
		return c.group.Refuse(err)
	}
	return c.pointToPoint("send", buf, count, dt, dest, tag)
}

// Recv implements [comm.Communicator]. Lengths are compared; MPI does not tell
// the receiver the sender's type.
func (c *communicator) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	if err := c.check.Recv(buf, count, dt, src); err != nil {
		return c.group.Refuse(err)
	}
	return c.pointToPoint("recv", buf, count, dt, src, tag)
}

func (c *communicator) pointToPoint(name string, buf uintptr, count int, dt dtype.DType, peer int, tag uint32) error {
	wide := uint64(tag) > c.state.tagLimit
	if wide && c.native {
		return c.group.Refuse(c.check.Fail(name, fmt.Errorf("%w: tag %d; the highest of this MPI library is %d",
			comm.ErrUnsupported, tag, c.state.tagLimit)))
	}
	if err := c.enter(name); err != nil {
		return err
	}
	o := c.newOp()
	o.name, o.total, o.dt, o.peer, o.tag, o.mpiType = name, count, dt, peer, uintptr(tag), c.lib.typeOf(dt)
	switch memory := spanOf(buf, count*dt.Size()); {
	case name == "send" && wide:
		o.step, o.send, o.reads, o.work = stepWideSend, buf, memory, wideHeaderSize
	case name == "send":
		o.step, o.send, o.reads = stepSend, buf, memory
	case wide:
		o.step, o.recv, o.writes = stepWideRecv, buf, memory
	default:
		o.step, o.recv, o.writes = stepRecv, buf, memory
	}
	c.add(o)
	return c.leave()
}

// Group implements [comm.Communicator].
func (c *communicator) Group(submit func() error) error {
	if err := c.enter("group"); err != nil {
		return err
	}
	c.mu.Unlock()
	return c.group.Run(submit, c.endGroup)
}

// endGroup hands the operations of a group to the engine, or forgets them if
// the group failed.
func (c *communicator) endGroup(failed error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ops := c.group.ops
	c.group.ops = ops[:0]
	err := c.usable("group")
	if failed != nil || err != nil {
		for _, o := range ops {
			o.reset()
			c.free = append(c.free, o)
		}
		return err
	}
	c.groups++
	for _, o := range ops {
		c.enqueue(o, c.groups)
	}
	c.state.progress.notify()
	return c.start()
}

// Sync implements [comm.Communicator].
func (c *communicator) Sync(ctx context.Context) error {
	return c.sync(ctx, "sync")
}

// sync is Sync under the name of the call that waits, which no group can hold.
func (c *communicator) sync(ctx context.Context, name string) error {
	if err := c.group.Outside(); err != nil {
		return c.group.Refuse(c.check.Fail(name, err))
	}
	c.mu.Lock()
	err := c.usable(name)
	c.mu.Unlock()
	if err != nil {
		return err
	}
	return c.wait(ctx, name)
}

// Barrier implements [comm.Communicator] with two of MPI's (MPI_Ibarrier), the
// second of which starts when the first is done. So no rank leaves the barrier
// if another gave up before all had come: what that one sent so far would end a
// single MPI barrier on the others. With native collectives it is one.
func (c *communicator) Barrier(ctx context.Context) error {
	const name = "barrier"
	if err := c.sync(ctx, name); err != nil {
		return err
	}
	if err := c.enter(name); err != nil {
		return err
	}
	o := c.newOp()
	o.name, o.step = name, stepBarrier
	c.add(o)
	if err := c.leave(); err != nil {
		return err
	}
	return c.wait(ctx, name)
}

func stepBarrier(e *engine, o *op) (bool, error) {
	if o.phase == 2 || o.phase == 1 && e.native {
		return true, nil
	}
	slot := e.table.add(o, sent)
	return false, e.table.posted(e.lib, "MPI_Ibarrier", e.lib.call(e.lib.Ibarrier, e.pub, slot))
}

// CheckDevice implements [comm.Reacher]. Device memory needs a CUDA-aware
// library, and native collectives: this package's own reduce on the host.
func (c *communicator) CheckDevice(d runtime.Device) error {
	if d.Kind == runtime.CPU || d.Kind == runtime.CUDA && c.lib.cuda && c.native {
		return nil
	}
	reason := "this MPI library is not CUDA-aware"
	if c.lib.cuda {
		reason = "mpi reaches it with native collectives only (" + CollectivesVariable + "=native)"
	}
	return c.check.Fail("device", fmt.Errorf(
		"%w: %v: %s; use the nccl backend, or stage through host memory (copy out, communicate, copy in)",
		comm.ErrDevice, d, reason))
}

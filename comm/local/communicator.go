package local

import (
	"context"
	"fmt"
	"runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	device "github.com/tutti-go/tutti/runtime"
)

// communicator is the handle of one rank. Nothing in the world refers to it,
// so that it is garbage collected, and noticed, when the rank forgets it.
type communicator struct{ e *endpoint }

var (
	_ comm.Communicator = (*communicator)(nil)
	_ comm.Reacher      = (*communicator)(nil)
)

func newCommunicator(e *endpoint) *communicator {
	c := &communicator{e}
	e.leakAlarm = runtime.AddCleanup(c, (*endpoint).leaked, e)
	return c
}

func (c *communicator) Rank() int      { return c.e.rank }
func (c *communicator) WorldSize() int { return c.e.world.size }

func (c *communicator) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if err := c.e.check.AllReduce(send, recv, count, dt, op); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: send, recv: recv, count: count, kind: allReduce, dt: dt, op: op}, 0, nil)
}

func (c *communicator) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	if err := c.e.check.Broadcast(buf, count, dt, root); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: buf, recv: buf, count: count, root: int32(root), kind: broadcast, dt: dt}, 0, nil)
}

func (c *communicator) Reduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp, root int) error {
	if err := c.e.check.Reduce(send, recv, count, dt, op, root); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: send, recv: recv, count: count, root: int32(root), kind: reduce, dt: dt, op: op}, 0, nil)
}

func (c *communicator) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	if err := c.e.check.AllGather(send, recv, count, dt); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: send, recv: recv, count: count, kind: allGather, dt: dt}, 0, nil)
}

func (c *communicator) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	if err := c.e.check.AllGatherV(send, recv, counts, displs, dt); err != nil {
		return c.e.group.Refuse(err)
	}
	d := details{lists: [4][]int{sendCounts: counts, sendDispls: displs}}
	return c.e.submit(&call{send: send, recv: recv, kind: allGatherV, dt: dt}, 0, &d)
}

func (c *communicator) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if err := c.e.check.ReduceScatter(send, recv, count, dt, op); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: send, recv: recv, count: count, kind: reduceScatter, dt: dt, op: op}, 0, nil)
}

func (c *communicator) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	if err := c.e.check.AllToAll(send, recv, count, dt); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: send, recv: recv, count: count, kind: allToAll, dt: dt}, 0, nil)
}

func (c *communicator) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	if err := c.e.check.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt); err != nil {
		return c.e.group.Refuse(err)
	}
	d := details{lists: [4][]int{sendCounts, sendDispls, recvCounts, recvDispls}}
	return c.e.submit(&call{send: send, recv: recv, kind: allToAllV, dt: dt}, 0, &d)
}

func (c *communicator) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	if err := c.e.check.Gather(send, recv, count, dt, root); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: send, recv: recv, count: count, root: int32(root), kind: gather, dt: dt}, 0, nil)
}

func (c *communicator) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	if err := c.e.check.Scatter(send, recv, count, dt, root); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: send, recv: recv, count: count, root: int32(root), kind: scatter, dt: dt}, 0, nil)
}

func (c *communicator) Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
	if err := c.e.check.Send(buf, count, dt, dest); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: buf, count: count, root: int32(dest), kind: send, dt: dt}, tag, nil)
}

func (c *communicator) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	if err := c.e.check.Recv(buf, count, dt, src); err != nil {
		return c.e.group.Refuse(err)
	}
	return c.e.submit(&call{send: buf, count: count, root: int32(src), kind: recv, dt: dt}, tag, nil)
}

func (c *communicator) Group(submit func() error) error {
	defer runtime.KeepAlive(c)
	return c.e.runGroup(submit)
}

func (c *communicator) Sync(ctx context.Context) error {
	defer runtime.KeepAlive(c)
	return c.e.sync(ctx, "sync")
}

func (c *communicator) Barrier(ctx context.Context) error {
	defer runtime.KeepAlive(c)
	return c.e.rendezvous(ctx, &call{kind: barrier}, nil)
}

func (c *communicator) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	defer runtime.KeepAlive(c)
	child, err := c.e.split(ctx, color, key)
	if child == nil {
		return nil, err
	}
	return child, err
}

func (c *communicator) Close() error {
	defer runtime.KeepAlive(c)
	return c.e.close()
}

// CheckDevice implements [comm.Reacher].
func (c *communicator) CheckDevice(d device.Device) error {
	if d.Kind == device.CPU {
		return nil
	}
	return c.e.check.Fail("device", fmt.Errorf("%w: memory of %v is out of reach of goroutines; comm/nccl moves it", comm.ErrDevice, d))
}

// rendezvous submits a collective and waits for it, which no group can hold.
func (e *endpoint) rendezvous(ctx context.Context, c *call, d *details) error {
	name := kinds[c.kind].name
	if err := e.group.Outside(); err != nil {
		return e.group.Refuse(e.check.Fail(name, err))
	}
	if err := e.submit(c, 0, d); err != nil {
		return err
	}
	return e.settle(ctx, name)
}

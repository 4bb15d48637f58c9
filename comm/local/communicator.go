package local

import (
	"context"
	"fmt"
	"runtime"

	"github.com/tutti-go/tutti/comm"
	device "github.com/tutti-go/tutti/runtime"
)

// communicator is the handle of one rank. Nothing in the world refers to it,
// so that it is garbage collected, and noticed, when the rank forgets it.
type communicator struct {
	comm.Calls
	e *endpoint
}

var (
	_ comm.Communicator = (*communicator)(nil)
	_ comm.Reacher      = (*communicator)(nil)
)

func newCommunicator(e *endpoint) *communicator {
	c := &communicator{comm.NewCalls(&e.check, e), e}
	e.leakAlarm = runtime.AddCleanup(c, (*endpoint).leaked, e)
	return c
}

func (c *communicator) Sync(ctx context.Context) error {
	defer runtime.KeepAlive(c)
	return c.e.sync(ctx, "sync")
}

func (c *communicator) Barrier(ctx context.Context) error {
	defer runtime.KeepAlive(c)
	return c.e.rendezvous(ctx, comm.OpBarrier, nil)
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

// rendezvous submits a collective that moves nothing and waits for it.
func (e *endpoint) rendezvous(ctx context.Context, op comm.Op, split *splitCall) error {
	if err := e.submit(&comm.Call{Op: op}, split); err != nil {
		return e.check.Fail(op.String(), err)
	}
	return e.settle(ctx, op.String())
}

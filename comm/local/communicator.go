package local

import (
	"context"
	"runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	device "github.com/tutti-go/tutti/runtime"
)

// communicator is the handle of one rank. Nothing in the world refers to it,
// so that it is garbage collected, and noticed, when the rank forgets it.
type communicator struct {
	backend.Calls
	*endpoint
}

var (
	_ comm.Communicator = (*communicator)(nil)
	_ comm.Reacher      = (*communicator)(nil)
	_ comm.Ender        = (*communicator)(nil)
	_ comm.Progresser   = (*communicator)(nil)
)

func newCommunicator(e *endpoint) *communicator {
	c := &communicator{endpoint: e}
	c.Calls = backend.NewCalls(&e.check, c)
	e.leakAlarm = runtime.AddCleanup(c, (*endpoint).leaked, e)
	return c
}

// Wait implements [backend.Backend].
func (c *communicator) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	defer runtime.KeepAlive(c)
	switch w.Op {
	case comm.OpSync:
		return nil, c.sync(ctx)
	case comm.OpBarrier:
		return nil, c.meet(ctx, comm.OpBarrier, nil)
	}
	child, err := c.split(ctx, w)
	if child == nil {
		return nil, err
	}
	return newCommunicator(child), nil
}

// Close implements [comm.Communicator].
func (c *communicator) Close() error {
	defer runtime.KeepAlive(c)
	return c.close()
}

// End implements [comm.Ender].
func (c *communicator) End(cause error) error {
	if cause != nil {
		c.abort(cause)
		return nil
	}
	return c.closeAll()
}

// CheckDevice implements [comm.Reacher].
func (c *communicator) CheckDevice(d device.Device) error {
	if d.Kind == device.CPU {
		return nil
	}
	return c.check.Unreachable(d, "goroutines reach host memory; comm/nccl moves that of GPUs")
}

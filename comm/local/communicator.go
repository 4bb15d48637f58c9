package local

import (
	"context"
	"fmt"
	"runtime"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/internal/leak"
	"github.com/tutti-go/tutti/internal/reductions"
	device "github.com/tutti-go/tutti/runtime"
)

// communicator is the handle of one rank. Nothing in the world refers to it,
// so that it is garbage collected, and noticed, when the rank forgets it.
type communicator struct {
	*backend.Base
	e *endpoint // the backend, which does not refer to it
}

var (
	_ comm.Communicator     = (*communicator)(nil)
	_ backend.MemoryChecker = (*communicator)(nil)
	_ backend.Progresser    = (*communicator)(nil)
	_ fixedpoint.Reducer    = (*communicator)(nil)
)

func newCommunicator(e *endpoint) *communicator {
	base := *backend.New(&e.check, &e.life, e) // a copy, for the life to keep what does not refer to c
	c := &communicator{&base, e}
	wait := base.Wait
	base.Wait = func(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
		defer runtime.KeepAlive(c)
		return wait(ctx, w)
	}
	mark := leak.NewMark(name, fmt.Sprintf("rank %d of %d", e.rank, e.world.size))
	e.leakAlarm = runtime.AddCleanup(c, func(mark *leak.Mark) { e.leaked(mark) }, mark)
	return c
}

// RunName tells the flight records of this world from those of others, of which the process may have several.
func (c *communicator) RunName() string { return c.e.world.run }

// Close implements [comm.Communicator]. It may be the last to refer to c.
func (c *communicator) Close() error {
	defer runtime.KeepAlive(c)
	return c.Base.Close()
}

// Wait implements [backend.Backend].
func (e *endpoint) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	switch w.Op {
	case comm.OpSync:
		return nil, e.finish(ctx)
	case comm.OpBarrier:
		return nil, e.meet(ctx, comm.OpBarrier, nil)
	}
	child, err := e.split(ctx, w)
	if child == nil {
		return nil, err
	}
	return newCommunicator(child), nil
}

// CheckDevice implements [backend.MemoryChecker].
func (c *communicator) CheckDevice(d device.Device) error {
	if d.Kind == device.CPU {
		return nil
	}
	return c.e.check.Unreachable(d, "goroutines reach host memory; comm/nccl moves GPU memory")
}

// AllReduceFixed implements [fixedpoint.Reducer]: the ranks share the elements as those of other allreduces, and who
// takes a chunk reads the terms of all ranks.
func (c *communicator) AllReduceFixed(sums []fixedpoint.Sum) error {
	total := 0
	for i := range sums {
		total += sums[i].N
	}
	call := comm.AllReduceCall(0, 0, total, dtype.F32, reductions.FixedPoint)
	c.e.reduced.Store(false)
	if err := c.e.submit(&call, nil, sums); err != nil {
		return c.e.life.Explain(call.Op.String(), err)
	}
	return nil
}

// Reduced implements [fixedpoint.Reducer].
func (c *communicator) Reduced() bool { return c.e.reduced.Load() }

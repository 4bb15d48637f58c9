package nccl

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// init acquires the resources that Close frees.
func (c *Comm) init(ctx context.Context) error {
	_, greatest, err := c.rt.StreamPriorities()
	if err != nil {
		return err
	}
	if c.created, err = c.rt.NewStream(greatest); err != nil {
		return err
	}
	c.stream = c.created
	if c.mark.event, err = c.rt.NewEvent(); err != nil {
		return err
	}
	c.marks.Init(c.rt)
	if c.scratch, err = c.rt.Allocate(gatherOffset(c.WorldSize()) + 16*c.WorldSize()); err != nil {
		return err
	}
	if c.data, err = c.splitControl(ctx); err != nil {
		return err
	}
	return c.connect(ctx)
}

// connect runs the first operations, in which NCCL connects each pair of ranks for each of its algorithms. Such a call
// blocks until the peers join it, whatever the deadline, and allocates memory, for which the driver may wait for
// kernels of other communicators. All ranks are together at this point, and an abort from outside enforces the
// deadline.
func (c *Comm) connect(ctx context.Context) error {
	// Earlier users of scratch may have work in flight.
	if err := c.created.WaitFor(c.rt.Stream()); err != nil {
		return err
	}
	var hello []comm.Call
	for r := range c.WorldSize() {
		hello = append(hello,
			comm.SendCall(c.scratch, 1, dtype.U8, r, 0),
			comm.RecvCall(c.scratch+uintptr(helloOffset+r), 1, dtype.U8, r, 0))
	}
	err := c.guarded(ctx, func() error {
		return errors.Join(c.submitTogether(ctx, hello), c.barrier(ctx))
	})
	if err != nil {
		return c.fail(err)
	}
	if c.oneProcess {
		return nil // ranks of one process fail together, and connections cost time to free
	}
	return c.connectAlgorithms(ctx)
}

// connectAlgorithms runs collectives that make NCCL connect all its algorithms.
func (c *Comm) connectAlgorithms(ctx context.Context) error {
	buf, err := c.rt.AllocateMapping(connectBytes[len(connectBytes)-1])
	if err != nil {
		return err
	}
	if err := c.created.WaitFor(c.rt.Stream()); err != nil {
		return errors.Join(err, c.rt.Deallocate(buf))
	}
	err = c.guarded(ctx, func() error {
		for _, bytes := range connectBytes {
			const dt = dtype.F32
			elements := bytes / dt.Size()
			share := elements / c.WorldSize()
			part := buf + uintptr(c.Rank()*share*dt.Size())
			for _, x := range []comm.Call{
				comm.AllReduceCall(buf, buf, elements, dt, comm.Sum),
				comm.ReduceScatterCall(buf, part, share, dt, comm.Sum),
				comm.AllGatherCall(part, buf, share, dt),
				comm.BroadcastCall(buf, elements, dt, 0),
				comm.ReduceCall(buf, buf, elements, dt, comm.Sum, 0),
			} {
				if err := c.submit(ctx, &x, c.data); err != nil {
					return err
				}
			}
		}
		return c.barrier(ctx)
	})
	if err != nil {
		err = c.fail(err) // nothing of this rank writes to the buffer after the abort
	}
	return errors.Join(err, c.freeWindow(window{addr: buf}))
}

// connectBytes are sizes at which NCCL chooses different algorithms.
var connectBytes = []int{256, 256 << 10, 32 << 20}

// guarded runs native calls that block until the peers join them. It aborts the communicator from outside if ctx ends
// or Close is called first.
func (c *Comm) guarded(ctx context.Context, calls func() error) error {
	ctx, cancel := c.life.Until(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- calls() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		err := waitError(ctx)
		c.Abort(err) // also when Close is called: the calls use memory
		return err
	}
}

package nccl

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// door is the [backend.Backend] of a communicator.
type door struct{ c *Comm }

// Submit implements [backend.Backend].
func (d door) Submit(x comm.Call) error { return d.c.submit(d.c.life, &x, nil) }

// SubmitTogether implements [backend.Backend].
func (d door) SubmitTogether(calls []comm.Call) error { return d.c.submitTogether(d.c.life, calls) }

// Wait implements [backend.Backend].
func (d door) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	switch w.Op {
	case comm.OpSync:
		return nil, d.c.sync(ctx)
	case comm.OpBarrier:
		return nil, d.c.barrier(ctx)
	}
	child, err := d.c.split(ctx, w)
	if child == nil {
		return nil, err // a nil *Comm must not become a non-nil interface
	}
	return child, nil
}

// Usable implements [backend.Backend].
func (d door) Usable() error { return d.c.usable() }

// submit starts a call on a native communicator, nil for the best one. ctx bounds its wait for
// communicators that are being freed.
func (c *Comm) submit(ctx context.Context, x *comm.Call, on *native) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.addCall(x)
	if on == nil {
		on = c.pick(x)
		c.submitted.add(x.Op, x)
	} else if x.Send == c.scratch+barrierOffset {
		c.submitted.add(comm.OpBarrier, x)
	} else {
		c.submitted.addOwn()
	}
	if err := c.flush(ctx, on); err != nil {
		return err
	}
	c.setMark(1)
	return nil
}

// submitTogether starts calls as one NCCL group, always on the data
// communicator: ranks may have different numbers of calls in a group, so a single call here may
// be one of several elsewhere.
func (c *Comm) submitTogether(ctx context.Context, calls []comm.Call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range calls {
		c.addCall(&calls[i])
	}
	c.submitted.addTogether(calls)
	if err := c.flush(ctx, c.data); err != nil {
		return err
	}
	c.setMark(len(calls))
	return nil
}

// pick chooses the native communicator of a call.
func (c *Comm) pick(x *comm.Call) *native {
	if c.windows.serve(x, c.WorldSize()) {
		return c.windows.native.Load()
	}
	return c.data
}

// flush makes the planned native calls, several of them as one NCCL group.
func (c *Comm) flush(ctx context.Context, on *native) error {
	planned := c.plan
	c.plan = planned[:0]
	if err := c.usable(); err != nil || len(planned) == 0 {
		return err
	}
	// If all ranks are in one process, freeing may wait for kernels of other ranks, and those for
	// this rank.
	if freeing.some.Load() && !c.oneProcess && c.WorldSize() > 1 {
		freeing.await(ctx, c.life) // Close does not wait for this
		ended := ctx.Err() != nil  // before usable: Close ends c.life
		if err := c.usable(); err != nil {
			return err
		}
		if ended { // as in sync
			return c.breakDown(c.stalled(comm.ContextError(ctx)))
		}
	}
	if !on.enter() {
		return errors.Join(comm.ErrBroken, c.usable()) // aborted since
	}
	// NCCL's groups belong to the OS thread; Current keeps the goroutine on it.
	err := c.rt.Current(func() error {
		if len(planned) == 1 {
			return c.invoke(&planned[0], on.handle)
		}
		c.lib.sym.GroupStart.Int()
		var first error
		for i := range planned {
			if first = c.invoke(&planned[i], on.handle); first != nil {
				break
			}
		}
		return errors.Join(first, c.status(c.lib.sym.GroupEnd, on.handle, c.lib.sym.GroupEnd.Int()))
	})
	on.leave()
	if err != nil {
		return c.breakDown(err)
	}
	return nil
}

// invoke makes a native call. All arguments are words, so a function ignores those that it does
// not have.
func (c *Comm) invoke(n *nativeCall, handle uintptr) error {
	a := &n.args
	a[n.count], a[n.count+1] = handle, c.stream.Handle()
	return c.status(n.fn, handle, n.fn.Int(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]))
}

// status turns the result of a native call into an error.
func (c *Comm) status(fn dl.Func, handle uintptr, result int32) error {
	if s := Status(result); s != statusSuccess {
		return c.lib.newError(fn, s, handle)
	}
	return nil
}

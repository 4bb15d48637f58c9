package nccl

import (
	"cmp"
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// adapter is the [backend.Backend] of a communicator.
type adapter struct {
	c *Comm // whose backend it is
}

// Submit implements [backend.Backend].
func (a adapter) Submit(x comm.Call) error {
	return a.c.submit(context.Background(), &x, nil)
}

// SubmitTogether implements [backend.Backend].
func (a adapter) SubmitTogether(calls []comm.Call) error {
	return a.c.submitTogether(context.Background(), calls)
}

// Wait implements [backend.Backend].
func (a adapter) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	switch w.Op {
	case comm.OpSync:
		return nil, a.c.sync(ctx)
	case comm.OpBarrier:
		return nil, a.c.barrier(ctx)
	}
	child, err := a.c.split(ctx, w)
	if child == nil {
		return nil, err // a nil *Comm must not become a non-nil interface
	}
	return child, nil
}

// submit starts a call on a native communicator, nil for the fastest one. ctx bounds its wait for communicators that
// are being freed.
func (c *Comm) submit(ctx context.Context, x *comm.Call, n *native) error {
	return c.fail(c.start(ctx, x, n))
}

// start is submit without the abort after an error.
func (c *Comm) start(ctx context.Context, x *comm.Call, n *native) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.life.Err(); err != nil {
		return err
	}
	c.addCall(x)
	switch {
	case n == nil:
		n = c.pick(x)
		c.submitted.add(x)
	case c.counts && x.Send == c.scratch+barrierOffset:
		c.submitted.add(&comm.Call{Op: comm.OpBarrier})
	default:
		c.submitted.addOwn()
	}
	return c.flush(ctx, n)
}

// submitTogether starts calls as one NCCL group, always on the data communicator: ranks may have different numbers of
// calls in a group, so a single call here may be one of several elsewhere.
func (c *Comm) submitTogether(ctx context.Context, calls []comm.Call) error {
	return c.fail(c.startTogether(ctx, calls))
}

// startTogether is submitTogether without the abort after an error.
func (c *Comm) startTogether(ctx context.Context, calls []comm.Call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.life.Err(); err != nil {
		return err
	}
	for i := range calls {
		c.addCall(&calls[i])
	}
	if c.counts {
		c.submitted.addTogether(calls)
	}
	return c.flush(ctx, c.data)
}

// pick chooses the native communicator of a call.
func (c *Comm) pick(x *comm.Call) *native {
	if c.windows.serve(x, c.WorldSize()) {
		return c.windows.native.Load()
	}
	return c.data
}

// flush makes the planned native calls, several of them as one NCCL group.
func (c *Comm) flush(ctx context.Context, n *native) error {
	planned := c.plan
	c.plan = planned[:0]
	// If all ranks are in one process, freeing may wait for kernels of other ranks, and these kernels for this rank.
	if freeing.busy.Load() && len(planned) > 0 && !c.oneProcess && c.WorldSize() > 1 {
		if err := c.awaitFreeing(ctx); err != nil {
			return err
		}
	}
	err := c.invokeAll(planned, n)
	if err == nil && c.marks.Due() {
		marked := c.submitted.soFar()
		c.marks.Set(c.stream, marked)
		if marked != c.submitted.ledger.Begun() { // there is a Split in flight before the calls
			c.marks.Miss()
		}
	}
	return err
}

// awaitFreeing waits until nothing is being freed, until ctx ends, or until the communicator is aborted or closed.
func (c *Comm) awaitFreeing(ctx context.Context) error {
	life, cancel := c.life.Until(ctx)
	defer cancel()
	freeing.await(life)
	if ctx.Err() != nil {
		return c.inFlightError(ctx)
	}
	return c.life.Err()
}

// invokeAll makes native calls.
func (c *Comm) invokeAll(planned plan, n *native) error {
	switch {
	case len(planned) == 0:
		return nil
	case !n.enter():
		return cmp.Or(c.life.Broken(), comm.ErrBroken)
	}
	defer n.leave()
	// NCCL's groups belong to the OS thread; Current keeps the goroutine on it.
	return c.rt.Current(func() error {
		if len(planned) == 1 {
			return c.invoke(&planned[0], n.handle)
		}
		c.lib.sym.GroupStart.Int()
		var first error
		for i := range planned {
			first = c.invoke(&planned[i], n.handle)
			if first != nil {
				break
			}
		}
		return errors.Join(first, c.status(c.lib.sym.GroupEnd, n.handle, c.lib.sym.GroupEnd.Int()))
	})
}

// invoke makes a native call. All arguments are words, so a function ignores surplus arguments.
func (c *Comm) invoke(n *nativeCall, handle uintptr) error {
	a := &n.args
	a[n.count] = handle
	a[n.count+1] = c.stream.Handle()
	return c.status(n.fn, handle, n.fn.Int(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]))
}

// status turns the result of a native call into an error.
func (c *Comm) status(fn dl.Func, handle uintptr, result int32) error {
	if s := ncclResult(result); s != statusSuccess {
		return c.lib.newError(fn, s, handle)
	}
	return nil
}

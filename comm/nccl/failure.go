package nccl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/poll"
)

// fail aborts the communicator unless err is a refusal of its life, and returns err. If NCCL
// cannot end this rank's kernels, the error says so. The caller holds no lock.
func (c *Comm) fail(err error) error {
	if err == nil || errors.Is(err, comm.ErrClosed) {
		return err
	}
	if c.life.Broken() == nil && !c.released.Load() {
		err = describeFailure(err, c.tell(err))
	}
	c.Abort(err)
	if c.stuck.Load() {
		const advice = "the GPU still waits for a peer, in a collective that NCCL cannot end: restart the process"
		return fmt.Errorf("%w; %s", err, advice)
	}
	return err
}

// Abort implements [backend.Backend]. It aborts what carries data, so that nothing waits for a
// missing rank. control lives on for Shrink, until Release.
func (a adapter) Abort(ctx context.Context, cause error) {
	c := a.c
	c.tell(cause)
	ending := endingTime(c.submitted.inFlight(), c.rt.HasCaptured())
	c.data.abort(ending)
	c.windows.native.Load().abort(ending)
	deadline, _ := ctx.Deadline()
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline.Add(ending))
	defer cancel()
	c.stuck.Store(!c.drain(ctx))
}

// replayedCalls is how many calls of graphs may be in flight.
const replayedCalls = 50

// endingTime is how long so many calls in flight may take to end, beside the time of an abort. Calls
// of graphs are not counted.
func endingTime(calls uint64, captured bool) time.Duration {
	if captured {
		calls += replayedCalls
	}
	return time.Duration(min(calls, uint64(endingMost/endingCall))) * endingCall
}

// drain waits for the end of aborted kernels, and reports whether it came. An abort takes
// milliseconds to reach them, and those on windows it does not reach.
func (c *Comm) drain(ctx context.Context) bool {
	if c.stream == nil {
		return true
	}
	// A stream that cannot be asked belongs to a device on which nothing runs.
	_ = poll.Until(ctx, c.done)
	return ctx.Err() == nil
}

// inFlightError is the error of a wait for what is in flight that ctx ended.
func (c *Comm) inFlightError(ctx context.Context) error {
	if !c.counts {
		return comm.ContextError(ctx) // nothing is the user's
	}
	return c.submitted.ledger.InFlight().Error(ctx)
}

// asyncError returns the asynchronous error of the native communicators that carry data.
func (c *Comm) asyncError() error {
	if err := c.data.asyncError(); err != nil {
		return err
	}
	if w := c.windows.native.Load(); w != nil {
		return w.asyncError()
	}
	return nil
}

// asyncError returns NCCL's asynchronous error, nil if there is none or the communicator
// is being freed.
func (n *native) asyncError() error {
	if !n.enter() {
		return nil
	}
	defer n.leave()
	if s := n.lib.asyncError(n.handle); s != statusSuccess {
		return n.lib.newError(n.lib.sym.GetAsyncError, s, n.handle)
	}
	return nil
}

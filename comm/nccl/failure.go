package nccl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/poll"
)

// fail aborts the communicator and returns err, unless its lifecycle refused the call. If NCCL cannot end this rank's
// kernels, the error says so. The caller must hold no lock.
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

// Abort implements [backend.Backend]. It aborts the native communicators that carry data, so that nothing waits for a
// missing rank. control stays usable for Shrink, until Release.
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

// replayedCalls is the assumed number of calls of graphs in flight.
const replayedCalls = 50

// endingTime is how long this number of calls in flight may take to end, in addition to the time of an abort. Calls of
// graphs are not counted.
func endingTime(calls uint64, captured bool) time.Duration {
	if captured {
		calls += replayedCalls
	}
	return time.Duration(min(calls, uint64(endingMost/endingCall))) * endingCall
}

// drain waits for aborted kernels to end, and reports whether they have. An abort takes milliseconds to reach kernels,
// and never reaches kernels on windows.
func (c *Comm) drain(ctx context.Context) bool {
	if c.stream == nil {
		return true
	}
	// If the stream cannot be queried, nothing runs on its device.
	_ = poll.Until(ctx, c.done)
	return ctx.Err() == nil
}

// inFlightError returns the error of a wait that ctx ended, with the calls in flight.
func (c *Comm) inFlightError(ctx context.Context) error {
	err := waitError(ctx)
	if !c.counts || errors.Is(err, comm.ErrPeerFailed) {
		return err // none of the user's calls is in flight, or another rank is to blame
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

// asyncError returns NCCL's asynchronous error, nil if there is none or the communicator is being freed.
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

package nccl

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// asyncErrorEvery is how many times Sync asks the stream for each time it asks NCCL for its
// asynchronous state, which costs more and changes rarely.
const asyncErrorEvery = 16

// sync is Sync, as [Comm] describes it, and what Close drains with.
func (c *Comm) sync(ctx context.Context) error {
	if c.data == nil || c.life.Broken() != nil {
		return c.life.Broken() // or creation failed before there was anything to wait for
	}
	var done extent
	wait, collectives := c.submitted.begin()
	looks := 0
	defer func() { c.submitted.end(done) }()
	err := poll.Until(ctx, func() (bool, error) {
		if looks%asyncErrorEvery == 0 {
			if err := errors.Join(c.asyncError(), c.abandoned(collectives)); err != nil {
				return false, err
			}
		}
		looks++
		if c.life.Closed() { // a call that was accepted before may be in its launch
			if !c.mu.TryLock() {
				return false, nil
			}
			c.mu.Unlock()
		}
		return c.done()
	})
	switch {
	case c.life.Broken() != nil: // the abort ends kernels as well
		return c.fail(c.life.Broken())
	case err == nil:
		if cause := c.submitted.cause(); cause != nil { // what is done counts no more: a peer may have aborted as well
			return fmt.Errorf("%w: %w", comm.ErrBroken, cause)
		}
		if err = c.abandoned(collectives); err != nil {
			return c.fail(err)
		}
		if c.released.Load() { // and with it what was known of peers
			return c.life.Err()
		}
		done = wait
		return nil
	case ctx.Err() != nil:
		return c.fail(c.inFlightError(ctx))
	case c.released.Load():
		return c.life.Err() // the stream is gone
	case inCapture(err): // the caller's mistake, nothing is wrong with the peers
		return fmt.Errorf("%w: %w", comm.ErrArgument, err)
	}
	return c.fail(err)
}

// done asks the stream whether it is idle. Close may take the stream away between two calls.
func (c *Comm) done() (bool, error) {
	c.streamMu.RLock()
	defer c.streamMu.RUnlock()
	return c.stream.Done()
}

// inCapture reports whether the driver refused a call because of a capture.
func inCapture(err error) bool {
	var e *cuda.Error
	return errors.As(err, &e) && e.InCapture()
}

// barrier is an allreduce of one element: NCCL returns at once for none.
func (c *Comm) barrier(ctx context.Context) error {
	cell := c.scratch + barrierOffset
	x := comm.AllReduceCall(cell, cell, 1, dtype.I32, comm.Max)
	if err := c.submit(ctx, &x, c.data); err != nil {
		return err
	}
	return c.sync(ctx)
}

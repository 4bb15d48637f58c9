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

// asyncErrorEvery is the number of stream queries in Sync for each query of NCCL's asynchronous state, which costs
// more and rarely changes.
const asyncErrorEvery = 16

// sync is Sync, as [Comm] describes it, and the drain of Close.
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
		if c.life.Closed() { // a call accepted before Close may be in its launch
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
		if cause := c.submitted.cause(); cause != nil { // completed work no longer counts: a peer may have aborted as well
			return fmt.Errorf("%w: %w", comm.ErrBroken, cause)
		}
		if err = c.abandoned(collectives); err != nil {
			return c.fail(err)
		}
		if c.released.Load() { // Release has freed the knowledge about peers
			return c.life.Err()
		}
		done = wait
		return nil
	case ctx.Err() != nil:
		return c.fail(c.inFlightError(ctx))
	case c.released.Load():
		return c.life.Err() // the stream is gone
	case inCapture(err): // the caller's mistake; the peers are unaffected
		return fmt.Errorf("%w: %w", comm.ErrArgument, err)
	}
	return c.fail(err)
}

// done queries whether the stream is idle. Close may close the stream between two queries.
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

// barrier is an allreduce of one element: with no elements NCCL returns at once.
func (c *Comm) barrier(ctx context.Context) error {
	cell := c.scratch + barrierOffset
	x := comm.AllReduceCall(cell, cell, 1, dtype.I32, comm.Max)
	if err := c.submit(ctx, &x, c.data); err != nil {
		return err
	}
	return c.sync(ctx)
}

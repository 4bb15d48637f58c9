package nccl

import (
	"context"
	"errors"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// asyncErrorEvery is how many looks at the stream Sync takes for one at NCCL's
// own state, which costs more and changes rarely.
const asyncErrorEvery = 16

// sync is Sync, as [Comm] describes it.
func (c *Comm) sync(ctx context.Context) error {
	if err := c.usable(); err != nil {
		return err
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
		return c.done()
	})
	switch {
	case err == nil:
		// The stream is also done if another goroutine gave up and aborted, or
		// another rank.
		if err := c.sound(); err != nil {
			return err
		}
		if err := c.abandoned(collectives); err != nil {
			return c.breakDown(err)
		}
		if c.closed() { // and with it what was known of others
			return c.usable()
		}
		done = wait
		return nil
	case ctx.Err() != nil:
		return c.breakDown(c.stalled(comm.ContextError(ctx)))
	case c.closed():
		return c.usable() // and the stream is gone
	case inCapture(err):
		return err // the caller's mistake, nothing is wrong with the peers
	}
	return c.breakDown(err)
}

// done asks the stream. Close, which others may call, takes it away between two
// looks.
func (c *Comm) done() (bool, error) {
	c.looks.RLock()
	defer c.looks.RUnlock()
	return c.stream.Done()
}

// abandoned returns an error if another rank is known to have given up before so many
// collectives.
//
// The abort of one rank lets kernels of others go on, with whatever lies in memory: on
// their way out its own still store the flags and steps that the others wait for. NCCL
// tells those nothing, so a rank tells them before ([Comm.tellOthers]).
func (c *Comm) abandoned(collectives uint64) error {
	if c.reporter == nil {
		return nil
	}
	if c.rt.HasCaptured() { // replays are not counted
		collectives = math.MaxUint64
	}
	return c.reporter.Failed(c.name, c.Rank(), collectives)
}

// inCapture reports whether the driver refused a call because of a capture.
func inCapture(err error) bool {
	var e *cuda.Error
	return errors.As(err, &e) && e.InCapture()
}

// asyncError returns what went wrong in the native communicators that carry data.
func (c *Comm) asyncError() error {
	if err := c.data.asyncError(); err != nil {
		return err
	}
	if w := c.windows.native.Load(); w != nil {
		return w.asyncError()
	}
	return nil
}

// barrier is an allreduce of one element: NCCL returns at once for none.
func (c *Comm) barrier(ctx context.Context) error {
	at := c.scratch + barrierOffset
	x := comm.AllReduceCall(at, at, 1, dtype.I32, comm.Max)
	if err := c.submit(ctx, &x, c.data); err != nil {
		return err
	}
	return c.sync(ctx)
}

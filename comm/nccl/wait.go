package nccl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime/cuda"
)

const (
	// closeTimeout bounds how long Close waits for pending work.
	closeTimeout = 10 * time.Second
	// drainTimeout bounds how long a communicator that broke waits for its
	// kernels to end. An abort takes milliseconds to reach them.
	drainTimeout = 3 * time.Second
)

// asyncErrorEvery is how many looks at the stream Sync takes for one at NCCL's
// own state, which costs more and changes rarely.
const asyncErrorEvery = 16

// Sync implements [comm.Communicator]. It watches NCCL's asynchronous error
// state; when that, or ctx, ends the wait, the communicator is aborted, and
// buffers are the caller's again when Sync returns. That does not reach kernels
// on symmetric buffers, see AllocateSymmetric.
func (c *Comm) Sync(ctx context.Context) error { return c.sync(ctx, "sync") }

func (c *Comm) sync(ctx context.Context, op string) error {
	if err := c.waitable(op); err != nil {
		return err
	}
	looks := 0
	err := poll.Until(ctx, func() (bool, error) {
		if looks%asyncErrorEvery == 0 {
			if err := c.asyncError(); err != nil {
				return false, err
			}
		}
		looks++
		return c.stream.Done()
	})
	switch {
	case err == nil:
		// The stream is also done if another goroutine gave up and aborted.
		return c.sound(op)
	case ctx.Err() != nil:
		return c.breakDown(op, comm.ContextError(ctx))
	case inCapture(err):
		return c.Fail(op, err) // the caller's mistake, nothing is wrong with the peers
	}
	return c.breakDown(op, err)
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

// Barrier implements [comm.Communicator]: an allreduce of one element, because
// NCCL returns at once for none.
func (c *Comm) Barrier(ctx context.Context) error {
	if err := c.waitable("barrier"); err != nil {
		return err
	}
	at := c.scratch + barrierOffset
	if err := c.submit("barrier", 1, newCall("ncclAllReduce", c.lib.sym.AllReduce,
		at, at, 1, uintptr(typeTable[dtype.I32]), opTable[comm.Max])); err != nil {
		return err
	}
	return c.sync(ctx, "barrier")
}

// waitable reports why the caller cannot wait now.
func (c *Comm) waitable(op string) error {
	if err := c.group.Outside(); err != nil {
		return c.group.Refuse(c.Fail(op, err))
	}
	return c.usable(op)
}

// usable reports why nothing can be submitted any more.
func (c *Comm) usable(op string) error {
	if c.closed.Load() {
		return c.Fail(op, comm.ErrClosed)
	}
	return c.sound(op)
}

// sound reports what broke the communicator.
func (c *Comm) sound(op string) error {
	if cause := c.broken.Load(); cause != nil {
		return c.Fail(op, fmt.Errorf("%w: %w", comm.ErrBroken, *cause))
	}
	return nil
}

// breakDown marks the communicator as broken, aborts its work, so that nothing
// waits for a peer that will not come, and waits until its kernels have ended.
// The control communicator lives on for Shrink.
func (c *Comm) breakDown(op string, cause error) error {
	if c.broken.CompareAndSwap(nil, &cause) {
		c.group.Free()
		c.abort()
		c.drain()
		close(c.drained)
	}
	<-c.drained
	if c.stuck.Load() {
		return c.Fail(op, fmt.Errorf("%w; the GPU still waits for a peer, in a collective that NCCL cannot end: restart the process", cause))
	}
	return c.Fail(op, cause)
}

// abort ends what carries data.
func (c *Comm) abort() {
	c.data.abort()
	c.windows.native.Load().abort()
}

// drain waits until the aborted kernels have ended.
func (c *Comm) drain() {
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	// A stream that cannot be asked belongs to a device on which nothing runs.
	_ = poll.Until(ctx, func() (bool, error) { return c.stream.Done() })
	c.stuck.Store(ctx.Err() != nil)
}

// untilClosed returns a context that ends with ctx, and when Close is called.
func (c *Comm) untilClosed(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.life, func() { cancel(comm.ErrClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// Close implements [comm.Communicator]. Graphs that hold collectives of this
// communicator are closed before it.
func (c *Comm) Close() error {
	if !c.closed.CompareAndSwap(false, true) {
		return nil
	}
	c.leakAlarm.Stop()
	c.group.Free()
	c.endLife() // a Split that waits for a peer ends
	if c.broken.Load() == nil {
		c.finish()
	}
	c.controlMu.Lock()
	c.control.abort()
	c.controlMu.Unlock()
	err := c.giveBack()
	if c.own != nil {
		err = errors.Join(err, c.own.Close())
	}
	if err != nil {
		return c.Fail("close", err)
	}
	return nil
}

// finish gives pending work a bounded time, and frees the communicators that
// carry data.
func (c *Comm) finish() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if c.stream != nil {
		if err := c.stream.Synchronize(ctx); err != nil {
			slog.Error("nccl: closed with work pending", "rank", c.Rank(), "err", err)
			_ = c.breakDown("close", comm.ErrClosed)
			return
		}
	}
	c.windows.native.Load().destroy()
	c.data.destroy()
}

// giveBack frees the communicator's memory.
func (c *Comm) giveBack() error {
	c.mu.Lock()
	list := c.windows.list
	c.windows.list = nil
	c.mu.Unlock()
	var errs []error
	for _, w := range list {
		errs = append(errs, c.freeWindow(w))
	}
	if c.settled() {
		errs = append(errs, c.rt.Deallocate(c.scratch))
	}
	return errors.Join(errs...)
}

// settled reports whether no kernel of this rank uses the communicator's memory
// any more. It waits for those of a communicator that just broke.
func (c *Comm) settled() bool {
	if c.broken.Load() != nil {
		<-c.drained
	}
	return !c.stuck.Load()
}

// freeWindow gives the memory of a symmetric buffer back. That of a broken
// communicator goes to the system: peers that have not noticed yet may still
// write to it, to which they hold references of their own, so nobody else may
// get it. And if a kernel of this rank still uses it, it stays.
func (c *Comm) freeWindow(w window) error {
	switch {
	case !c.settled():
		return nil
	case c.broken.Load() != nil:
		return c.rt.ReleaseMapping(w.addr)
	}
	return c.rt.Deallocate(w.addr)
}

// leaked is called when the garbage collector finds a communicator that was
// never closed. What it holds of the GPU is lost.
func leaked(name string) {
	slog.Error("nccl: a communicator was never closed", "communicator", name)
}

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
)

// closeTimeout bounds how long Close waits for pending work.
const closeTimeout = 10 * time.Second

func (l *library) asyncError(handle uintptr) Status {
	return Status(int32(l.out(func(p uintptr) { l.sym.GetAsyncError.Int(handle, p) })))
}

// asyncError returns what went wrong in the native communicators that carry data.
func (c *Comm) asyncError() error {
	for _, handle := range [...]uintptr{c.handle, c.windows.handle.Load()} {
		if handle == 0 {
			continue
		}
		if s := c.lib.asyncError(handle); s != statusSuccess {
			return c.lib.newError("ncclCommGetAsyncError", s, handle)
		}
	}
	return nil
}

// asyncErrorEvery is how many looks at the stream Sync takes for one at NCCL's
// own state, which costs more and changes rarely.
const asyncErrorEvery = 16

// Sync implements [comm.Communicator]. It watches NCCL's asynchronous error
// state; when that, or ctx, ends the wait, the communicator is aborted.
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
		return nil
	case ctx.Err() != nil:
		return c.breakDown(op, comm.ContextError(ctx))
	}
	return c.breakDown(op, err)
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
	if cause := c.broken.Load(); cause != nil {
		return c.Fail(op, fmt.Errorf("%w: %w", comm.ErrBroken, *cause))
	}
	return nil
}

// breakDown marks the communicator as broken and aborts its work, so that
// nothing waits for a peer that will not come. The control communicator lives
// on for Shrink.
func (c *Comm) breakDown(op string, cause error) error {
	if c.broken.CompareAndSwap(nil, &cause) {
		c.group.Free()
		c.abort()
	}
	return c.Fail(op, cause)
}

// abort ends the communicators that carry data, once: kernels that wait for
// peers stop. It may be called while another goroutine is inside a call, which
// then fails.
func (c *Comm) abort() {
	if c.gone.CompareAndSwap(false, true) {
		c.inBackground("ncclCommAbort", c.handle, c.lib.abort)
		c.inBackground("ncclCommAbort", c.windows.handle.Swap(0), c.lib.abort)
	}
}

func (l *library) abort(handle uintptr) Status { return Status(l.sym.Abort.Int(handle)) }

// destroy ends a communicator that has no work left.
func (l *library) destroy(handle uintptr) Status {
	if s := Status(l.sym.Finalize.Int(handle)); s != statusSuccess {
		return s
	}
	return Status(l.sym.Destroy.Int(handle))
}

// inBackground makes a call that frees a native communicator (0 for none). The last rank
// of a process to do so frees the memory of all of them, on every GPU, and the
// driver lets that wait for the kernels there. These may be waiting for this
// very rank to join them in the next collective of another communicator, so
// the rank must not wait for the call.
func (c *Comm) inBackground(name string, handle uintptr, free func(handle uintptr) Status) {
	if handle == 0 {
		return
	}
	c.rt.Background(func() {
		err := c.rt.Current(func() error {
			// Afterwards the handle may not be asked for its state any more.
			if s := free(handle); s != statusSuccess && s != statusInProgress {
				return c.lib.newError(name, s, 0)
			}
			return nil
		})
		if err != nil {
			slog.Error("nccl: communicator not freed", "rank", c.Rank(), "err", err)
		}
	})
}

// Close implements [comm.Communicator].
func (c *Comm) Close() error {
	if !c.closed.CompareAndSwap(false, true) {
		return nil
	}
	c.group.Free()
	if c.broken.Load() == nil && c.handle != 0 {
		c.finish()
	}
	c.controlMu.Lock()
	defer c.controlMu.Unlock()
	c.inBackground("ncclCommAbort", c.control, c.lib.abort)
	errs := []error{c.rt.Deallocate(c.scratch)}
	c.mu.Lock()
	for _, w := range c.windows.list {
		errs = append(errs, c.rt.Deallocate(w.addr))
	}
	c.windows.list = nil
	c.mu.Unlock()
	if c.own != nil {
		errs = append(errs, c.own.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return c.Fail("close", err)
	}
	return nil
}

// finish gives pending work a bounded time, and frees the communicators that
// carry data.
func (c *Comm) finish() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if err := c.stream.Synchronize(ctx); err != nil {
		slog.Error("nccl: closed with work pending", "rank", c.Rank(), "err", err)
		c.abort()
		return
	}
	if c.gone.CompareAndSwap(false, true) {
		c.inBackground("ncclCommDestroy", c.windows.handle.Swap(0), c.lib.destroy)
		c.inBackground("ncclCommDestroy", c.handle, c.lib.destroy)
	}
}

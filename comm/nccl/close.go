package nccl

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// closeTimeout bounds how long Close waits for pending work.
const closeTimeout = 10 * time.Second

// Close implements [comm.Communicator]. Graphs that hold collectives of this
// communicator are closed before it.
func (c *Comm) Close() (err error) {
	c.closing.Do(func() { err = c.explain("close", c.close()) })
	return err
}

func (c *Comm) close() error {
	c.leakAlarm.Stop()
	if c.parent != nil {
		c.parent.children.remove(c)
	}
	c.end() // a Split that waits for a peer ends
	if c.sound() == nil {
		c.finish()
	}
	if c.reporter != nil { // who finishes in vain gives up, which the others are told
		c.reporter.remove(c.submitted, "closed its communicator")
	}
	c.control.mu.Lock()
	c.control.abort()
	c.control.mu.Unlock()
	err := c.giveBack()
	c.looks.Lock()
	if c.mark.event != nil {
		err = errors.Join(err, c.mark.event.Close())
	}
	if c.own != nil {
		err = errors.Join(err, c.own.Close())
	}
	c.looks.Unlock()
	c.endMarks()
	return err
}

// finish gives pending work a bounded time, and frees the communicators that
// carry data.
func (c *Comm) finish() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if c.stream != nil {
		if err := c.stream.Synchronize(ctx); err != nil {
			slog.Error("nccl: closed with work pending", "rank", c.Rank(), "err", err)
			_ = c.breakDown(comm.ErrClosed)
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

// freeWindow gives the memory of a symmetric buffer back. That of a broken
// communicator goes to the system: peers that have not noticed yet may still
// write to it, to which they hold references of their own, so nobody else may
// get it. And if a kernel of this rank still uses it, it stays.
//
// Where other ranks are in this process, NCCL unmaps it from their GPUs when it frees their
// communicators, which must not happen at the same time.
func (c *Comm) freeWindow(w window) error {
	switch {
	case !c.settled():
		return nil
	case c.sound() == nil:
		return c.rt.Deallocate(w.addr)
	case !c.control.shares:
		return c.rt.ReleaseMapping(w.addr)
	}
	c.rt.Background(func() {
		freeing.awaitAll()
		if err := c.rt.ReleaseMapping(w.addr); err != nil {
			slog.Error("nccl: window not released", "rank", c.Rank(), "err", err)
		}
	})
	return nil
}

// Err implements [comm.Communicator].
func (c *Comm) Err() error { return c.usable() }

// Abort implements [comm.Communicator]. The other ranks are told the cause as [Comm] says.
func (c *Comm) Abort(cause error) {
	if !c.closed() {
		_ = c.breakDown(cmp.Or(cause, comm.ErrCanceled)) // nothing is waited for but the end of the kernels
	}
}

// SubCommunicators implements [comm.Parent].
func (c *Comm) SubCommunicators() (open []comm.Communicator) {
	for _, child := range c.children.all() {
		open = append(append(open, child.SubCommunicators()...), child)
	}
	return open
}

// leaked is called when the garbage collector finds a communicator that was
// never closed. What it holds of the GPU is lost.
func leaked(name string, r *reporter, s *submissions) {
	if r != nil {
		r.remove(s, "lost its communicator without closing it")
	}
	slog.Error("nccl: a communicator was never closed", "communicator", name)
}

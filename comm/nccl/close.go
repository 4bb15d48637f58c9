package nccl

import (
	"context"
	"errors"
	"github.com/tutti-go/tutti/internal/leak"
	"log/slog"
)

// Release implements [backend.Backend]. Close graphs that hold collectives of the communicator first.
func (a adapter) Release(context.Context) error {
	c := a.c
	c.leakAlarm.Stop()
	c.released.Store(true)
	c.windows.native.Load().destroy() // unless it was aborted
	c.data.destroy()
	if c.group != nil { // a rank that cannot drain aborts, and needs the group until then
		c.group.Leave()
	}
	c.control.mu.Lock()
	c.control.abort(0)
	c.control.mu.Unlock()
	c.mu.Lock()
	list := c.windows.list
	c.windows.list = nil
	c.marks.Close(c.stuck.Load())
	c.mu.Unlock()
	var errs []error
	for _, w := range list {
		errs = append(errs, c.freeWindow(w))
	}
	if !c.stuck.Load() {
		errs = append(errs, c.rt.Deallocate(c.scratch))
	}
	c.streamMu.Lock()
	defer c.streamMu.Unlock()
	if c.mark.event != nil {
		errs = append(errs, c.mark.event.Close())
	}
	if c.created != nil {
		errs = append(errs, c.created.Close())
	}
	return errors.Join(errs...)
}

// freeWindow frees the memory of a symmetric buffer. The memory of an aborted communicator returns to the system
// instead of the cache: peers that have not noticed the abort may still write to it through their own references, so
// nobody else may get it. If a kernel of this rank still uses it, it stays allocated.
//
// If other ranks are in this process, NCCL unmaps the memory from their GPUs when it frees their communicators. That
// must not happen at the same time.
func (c *Comm) freeWindow(w window) error {
	switch {
	case c.stuck.Load():
		return nil
	case c.life.Broken() == nil:
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

// leaked is called when the garbage collector finds a communicator that was never closed. Its GPU memory is lost.
func leaked(mark *leak.Mark, g group) {
	if g != nil {
		g.Leave()
	}
	mark.Report()
}

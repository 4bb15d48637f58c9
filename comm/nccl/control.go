package nccl

import (
	"context"
	"fmt"
	goruntime "runtime"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// control is the native communicator that others are made out of.
type control struct {
	*native
	mu     sync.Mutex
	failed error // what left it in the middle of a call, of no use for another
}

// fromControl makes a native communicator out of control.
func (c *Comm) fromControl(ctx context.Context, blocking bool, fn dl.Func, call func(cell, cfg uintptr) uintptr) (handle uintptr, err error) {
	ctx, cancel := c.untilClosed(ctx)
	defer cancel()
	c.control.mu.Lock()
	defer c.control.mu.Unlock()
	switch {
	case c.closed():
		return 0, comm.ErrClosed
	case c.control.failed != nil:
		return 0, fmt.Errorf("%w: the communicator cannot make others since one of them failed: %w", comm.ErrBroken, c.control.failed)
	}
	cfg := c.options.config(blocking)
	handle, err = c.lib.create(ctx, c.rt, c.control.handle, fn, func(cell uintptr) uintptr {
		return call(cell, hostmem.AddrOf(cfg))
	})
	goruntime.KeepAlive(cfg)
	c.control.failed, c.control.midway = err, err != nil
	return handle, err
}

// splitControl makes a native communicator in blocking mode of all ranks.
func (c *Comm) splitControl(ctx context.Context) (*native, error) {
	handle, err := c.fromControl(ctx, true, c.lib.sym.Split, func(cell, cfg uintptr) uintptr {
		return c.lib.sym.Split.Call(c.control.handle, 0, uintptr(c.Rank()), cell, cfg)
	})
	if err != nil {
		return nil, err
	}
	return newNative(c.lib, c.rt, handle, c.sharesProcess()), nil
}

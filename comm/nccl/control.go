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

// control is the native communicator that others are split from.
type control struct {
	*native
	mu     sync.Mutex
	failed error // the error that left it in the middle of a call: it makes no others any more
}

// fromControl makes a native sub-communicator of control, unless stop returns an error before it
// is made.
func (c *Comm) fromControl(ctx context.Context, stop func() error, blocking bool, fn dl.Func, call func(cell, cfg uintptr) uintptr) (made *native, err error) {
	c.control.mu.Lock()
	defer c.control.mu.Unlock()
	if err := stop(); err != nil {
		return nil, err
	}
	if c.control.failed != nil {
		return nil, fmt.Errorf("%w: the communicator cannot make others since one of them failed: %w", comm.ErrBroken, c.control.failed)
	}
	cfg := c.options.config(blocking)
	made, err = c.lib.create(ctx, stop, c.rt, c.control.native, c.control.shares, fn, func(cell uintptr) uintptr {
		return call(cell, hostmem.AddrOf(cfg))
	})
	goruntime.KeepAlive(cfg)
	c.control.failed, c.control.midway = err, err != nil
	return made, err
}

// splitControl makes a native sub-communicator of all ranks, in blocking mode.
func (c *Comm) splitControl(ctx context.Context) (*native, error) {
	return c.fromControl(ctx, c.life.Err, true, c.lib.sym.Split, func(cell, cfg uintptr) uintptr {
		return c.lib.sym.Split.Call(c.control.handle, 0, uintptr(c.Rank()), cell, cfg)
	})
}

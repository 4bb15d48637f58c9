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

// control is the native communicator from which others are split.
type control struct {
	*native
	mu     sync.Mutex // held during a call
	failed error      // the error of a call that did not finish, after which none may begin; guarded by mu
}

// derivation describes a call that makes a sub-communicator of control.
type derivation struct {
	blocking bool                            // mode of the sub-communicator
	stop     func() error                    // its error ends the call
	fn       dl.Func                         // the function, for errors
	call     func(cell, cfg uintptr) uintptr // makes it; stores the handle in cell
}

// fromControl makes a native sub-communicator of control.
func (c *Comm) fromControl(ctx context.Context, d derivation) (*native, error) {
	c.control.mu.Lock()
	defer c.control.mu.Unlock()
	if err := d.stop(); err != nil {
		return nil, err
	}
	if c.control.failed != nil {
		const format = "%w: the communicator cannot make others since one of them failed: %w"
		return nil, fmt.Errorf(format, comm.ErrBroken, c.control.failed)
	}
	cfg := c.options.config(d.blocking)
	made, err := c.lib.create(ctx, creation{
		rt:     c.rt,
		parent: c.control.native,
		shares: c.control.shares,
		stop:   d.stop,
		fn:     d.fn,
		call: func(cell uintptr) uintptr {
			return d.call(cell, hostmem.AddrOf(cfg))
		},
	})
	goruntime.KeepAlive(cfg)
	c.control.failed = err
	c.control.midway = err != nil
	return made, err
}

// splitControl makes a native sub-communicator of all ranks, in blocking mode.
func (c *Comm) splitControl(ctx context.Context) (*native, error) {
	split := c.lib.sym.Split
	return c.fromControl(ctx, derivation{
		blocking: true,
		stop:     c.life.Err,
		fn:       split,
		call: func(cell, cfg uintptr) uintptr {
			return split.Call(c.control.handle, 0, uintptr(c.Rank()), cell, cfg)
		},
	})
}

package p2p

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
)

// split is Split. What the base splits off is made a communicator like this one,
// where that is possible.
func (c *Comm) split(ctx context.Context, color, key int) (comm.Communicator, error) {
	if err := c.usable(); err != nil {
		return nil, c.check.Fail("split", err)
	}
	base, err := c.Communicator.Split(ctx, color, key)
	if base == nil || err != nil {
		if err != nil && ctx.Err() != nil {
			_ = c.breakDown(err)
		}
		return nil, err
	}
	ops, ok := comm.As[streams](base)
	if !ok {
		return base, nil
	}
	var t *offloadTable
	if base.WorldSize() == c.WorldSize() {
		t = &c.offload // the same ranks
	}
	child, err := newComm(ctx, base, ops, c.rt, c.options, t)
	switch {
	case errors.Is(err, comm.ErrUnsupported):
		return base, nil
	case err != nil:
		return nil, errors.Join(c.check.Fail("split", err), base.Close())
	}
	child.parent = c
	c.mu.Lock()
	c.children[child] = struct{}{}
	c.mu.Unlock()
	return child, nil
}

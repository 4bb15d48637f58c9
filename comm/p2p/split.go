package p2p

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// split is Split. It decorates the base's sub-communicator like this one, if that is possible.
func (c *Comm) split(ctx context.Context, color, key int) (comm.Communicator, error) {
	base, err := c.Communicator.Split(ctx, color, key)
	if base == nil || err != nil {
		return nil, err
	}
	ops, ok := comm.As[streams](base)
	if !ok && c.FixedOrder() {
		err := fmt.Errorf("p2p: %w: the base's sub-communicator has no stream", comm.ErrUnsupported)
		return nil, errors.Join(err, base.Close())
	}
	if !ok {
		return base, nil
	}
	o := byTable
	if c.FixedOrder() {
		o = fixed
	}
	child, err := newComm(ctx, base, ops, c.rt, o)
	if o == byTable && errors.Is(err, comm.ErrUnsupported) {
		return base, nil
	}
	if err != nil {
		return nil, errors.Join(err, base.Close())
	}
	return child, nil
}

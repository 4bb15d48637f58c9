package p2p

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
)

// split is Split. The base's sub-communicator is decorated like this one, where that is possible.
func (c *Comm) split(ctx context.Context, color, key int) (comm.Communicator, error) {
	base, err := c.Communicator.Split(ctx, color, key)
	if base == nil || err != nil {
		return nil, err
	}
	ops, ok := comm.As[streams](base)
	if !ok {
		return base, nil
	}
	child, err := newComm(ctx, base, ops, c.rt)
	if errors.Is(err, comm.ErrUnsupported) {
		return base, nil
	}
	if err != nil {
		return nil, errors.Join(err, base.Close())
	}
	return child, nil
}

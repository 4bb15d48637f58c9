package local

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// Run makes a world of n ranks and runs body for each of them as [comm.Run]
// does: it closes the communicators, also those that the body split off and did
// not close, and a rank whose body returns an error or panics breaks them, so
// that the others get [comm.ErrPeerFailed] and the cause.
func Run(ctx context.Context, n int, body func(ctx context.Context, c comm.Communicator) error, opts ...Option) error {
	comms, err := New(n, opts...)
	if err != nil {
		return err
	}
	return comm.Run(ctx, comms, body)
}

// End implements [comm.Ender].
func (c *communicator) End(cause error) error {
	if cause != nil {
		c.abort(cause)
		return nil
	}
	return c.closeAll()
}

package p2p

import (
	"github.com/tutti-go/tutti/comm/backend"
)

// usable returns why nothing can be submitted any more, nil if it can.
func (c *Comm) usable() error { return backend.Unusable(c.closed.Load(), c.cause()) }

// sound returns what broke the communicator, nil if nothing did. Kernels that gave
// up break it when somebody looks.
func (c *Comm) sound() error { return backend.Unusable(false, c.cause()) }

func (c *Comm) cause() error {
	if cause := c.failure.Load(); cause != nil {
		return *cause
	}
	return nil
}

// breakDown breaks the communicator: its kernels stop waiting. It returns cause.
func (c *Comm) breakDown(cause error) error {
	c.failure.CompareAndSwap(nil, &cause)
	c.here.stopWaiting()
	return cause
}

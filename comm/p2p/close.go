package p2p

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/poll"
)

// closeTimeout bounds how long Close waits for pending work.
const closeTimeout = 10 * time.Second

// Close implements [comm.Communicator]: it closes the base, too. Graphs that hold
// operations of this communicator are closed before it.
func (c *Comm) Close() error { return c.finish(nil) }

// End implements [comm.Ender]: it ends the base, too, which tells the other ranks the
// cause if it can.
func (c *Comm) End(cause error) error {
	c.mu.Lock()
	children := make([]*Comm, 0, len(c.children))
	for child := range c.children {
		children = append(children, child)
	}
	c.mu.Unlock()
	var errs []error
	for _, child := range children {
		errs = append(errs, child.End(cause))
	}
	if cause != nil && !c.closed.Load() {
		_ = c.breakDown(cause)
	}
	return errors.Join(append(errs, c.finish(cause))...)
}

// finish closes the communicator, once, because of a cause if there is one.
func (c *Comm) finish(cause error) (err error) {
	c.closing.Do(func() { err = c.explain("close", c.close(cause)) })
	return err
}

func (c *Comm) close(cause error) error {
	c.closed.Store(true)
	if p := c.parent; p != nil {
		p.mu.Lock()
		delete(p.children, c)
		p.mu.Unlock()
	}
	if c.sound() == nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		if err := poll.Until(ctx, c.current().Done); err != nil {
			slog.Error("p2p: closed with work pending", "rank", c.Rank(), "err", err)
			_ = c.breakDown(comm.ErrClosed)
		}
	}
	stream := c.current()
	c.progress.looks.Lock() // nobody asks the stream, which the base closes
	defer c.progress.looks.Unlock()
	err := c.here.discard(stream, func() {
		if base, ok := comm.As[comm.Ender](c.Communicator); ok && cause != nil {
			_ = base.End(cause)
		}
	})
	c.progress.marks.Close(err != nil)
	return errors.Join(err, c.Communicator.Close())
}

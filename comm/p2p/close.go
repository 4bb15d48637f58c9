package p2p

import (
	"cmp"
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
func (c *Comm) Close() error { return c.finish() }

// Err implements [comm.Communicator].
func (c *Comm) Err() error { return c.usable() }

// Abort implements [comm.Communicator]: it aborts the base, too, which tells the other
// ranks the cause if it can.
func (c *Comm) Abort(cause error) {
	if !c.closed.Load() {
		_ = c.breakDown(cmp.Or(cause, comm.ErrCanceled))
		c.Communicator.Abort(cause)
	}
}

// SubCommunicators implements [comm.Parent].
func (c *Comm) SubCommunicators() (open []comm.Communicator) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for child := range c.children {
		open = append(append(open, child.SubCommunicators()...), child)
	}
	return open
}

// finish closes the communicator, once.
func (c *Comm) finish() (err error) {
	c.closing.Do(func() { err = c.explain("close", c.close()) })
	return err
}

func (c *Comm) close() error {
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
	err := c.here.discard(stream, nil)
	c.progress.marks.Close(err != nil)
	return errors.Join(err, c.Communicator.Close())
}

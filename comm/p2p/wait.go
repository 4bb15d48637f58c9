package p2p

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
)

// wait does a Sync, a Barrier or a Split.
func (c *Comm) wait(ctx context.Context, w comm.Wait) (child comm.Communicator, err error) {
	before := c.progress.soFar()
	switch w.Op {
	case comm.OpBarrier:
		err = c.barrier(ctx)
	case comm.OpSplit:
		child, err = c.split(ctx, w.Color, w.Key)
	default:
		err = c.sync(ctx)
	}
	if err == nil {
		c.progress.waited(w.Op, before)
	}
	return child, c.explain(w.Op.String(), err)
}

// sync is Sync. When ctx ends it, kernels that wait for peers end, and the error
// names the peer.
func (c *Comm) sync(ctx context.Context) error {
	if err := c.usable(); err != nil {
		return err
	}
	stopped := c.here.stopWith(ctx)
	err := c.Communicator.Sync(ctx)
	gaveUp := stopped()
	what := c.here.awaited()
	switch {
	case what != "" && c.failure.Load() != nil: // another goroutine gave up
		return c.sound()
	case what != "" && ctx.Err() != nil:
		return c.breakDown(fmt.Errorf("%w: %s", comm.ContextError(ctx), what))
	case what != "":
		return c.breakDown(c.here.fault())
	case err == nil:
		return c.usable() // and not closed, in which case nothing is known of kernels
	case gaveUp || errors.Is(err, comm.ErrPeerFailed):
		return c.breakDown(err)
	}
	return err
}

func (c *Comm) barrier(ctx context.Context) error {
	if err := c.usable(); err != nil {
		return err
	}
	if err := c.launch(c.here.barrier()); err != nil {
		return err
	}
	return c.sync(ctx)
}

// SyncCommStream implements [comm.StreamSyncOps].
func (c *Comm) SyncCommStream() error { return c.Sync(context.Background()) }

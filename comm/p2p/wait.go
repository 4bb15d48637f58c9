package p2p

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
)

// Wait implements [backend.Backend].
func (a adapter) Wait(ctx context.Context, w comm.Wait) (child comm.Communicator, err error) {
	c := a.c
	if w.Op != comm.OpSync {
		c.entered.Add(1)
		c.ledger.Begin(&comm.Call{Op: w.Op})
	}
	wait := c.ledger.Begun()
	switch w.Op {
	case comm.OpBarrier:
		err = c.launch(c.end.barrier())
		c.leave(1)
		if err == nil {
			err = c.sync(ctx)
		}
	case comm.OpSplit:
		child, err = c.split(ctx, w.Color, w.Key)
		c.leave(1)
		p := c.ledger.Progress()
		if wait.Collectives+wait.Messages > p.Collectives.Done+p.Messages.Done+1 {
			return child, err // it does not wait for calls before it
		}
	default:
		err = c.sync(ctx)
	}
	if err == nil {
		c.ledger.Done(wait)
	}
	return child, err
}

// sync is Sync, and what Close drains with. When ctx ends it, kernels that wait for peers
// abort, and the error names the peer.
func (c *Comm) sync(ctx context.Context) error {
	stopped := c.end.stopWith(ctx)
	err := c.Communicator.Sync(ctx)
	stopped()
	fault := c.end.fault(ctx)
	switch {
	case c.life.Broken() != nil: // another goroutine aborted
		return c.life.Broken()
	case fault != nil:
		return fault
	case c.end.isShut(): // and nothing is known of kernels
		return c.life.Err()
	}
	var named *comm.OpError
	if errors.As(err, &named) { // it is this communicator's
		err = named.Err
	}
	return err
}

// SyncCommStream implements [comm.StreamSyncOps].
func (c *Comm) SyncCommStream() error { return c.Sync(context.Background()) }

// Abort implements [backend.Backend]. Kernels tell those of the other ranks, and the base tells
// their hosts the cause, if it can.
func (a adapter) Abort(ctx context.Context, cause error) {
	end := a.c.end
	stream := a.c.Stream()
	end.stopWaiting()
	notice, cancel := context.WithTimeout(ctx, noticeTime)
	defer cancel()
	told := end.leave(notice, stream) // before the base aborts, if it has nothing in flight
	a.c.Communicator.Abort(cause)
	if !told {
		end.leave(ctx, stream)
	}
}

// Release implements [backend.Backend].
func (a adapter) Release(context.Context) error {
	return errors.Join(a.c.discard(), a.c.Communicator.Close())
}

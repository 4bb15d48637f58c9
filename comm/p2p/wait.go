package p2p

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
)

// Wait implements [backend.Backend].
func (a adapter) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	c := a.c
	switch w.Op {
	case comm.OpBarrier:
		return nil, c.barrier(ctx)
	case comm.OpSplit:
		return c.waitForSplit(ctx, w)
	}
	submitted := c.ledger.Begun()
	if err := c.sync(ctx); err != nil {
		return nil, err
	}
	c.ledger.Done(submitted)
	return nil, nil
}

// barrier is Barrier.
func (c *Comm) barrier(ctx context.Context) error {
	c.entered.Add(1)
	c.ledger.Begin(&comm.Call{Op: comm.OpBarrier})
	submitted := c.ledger.Begun()
	err := c.launch(c.end.barrier())
	c.leave()
	if err != nil {
		return err
	}
	if err := c.sync(ctx); err != nil {
		return err
	}
	c.ledger.Done(submitted)
	return nil
}

// waitForSplit is Split, which does not wait for calls before it.
func (c *Comm) waitForSplit(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	c.entered.Add(1)
	c.ledger.Begin(&comm.Call{Op: comm.OpSplit})
	submitted := c.ledger.Begun()
	child, err := c.split(ctx, w.Color, w.Key)
	c.leave()
	if err != nil {
		return child, err
	}
	progress := c.ledger.Progress()
	if submitted.Collectives+submitted.Messages <= progress.Collectives.Done+progress.Messages.Done+1 {
		c.ledger.Done(submitted) // only the split was in flight
	}
	return child, nil
}

// sync is Sync, and the drain of Close. When ctx ends the wait, kernels that wait for peers abort, and the error names
// the peer.
func (c *Comm) sync(ctx context.Context) error {
	stopped := c.end.stopWith(ctx)
	err := c.Communicator.Sync(ctx)
	stopped()
	fault := c.end.fault(ctx)
	if broken := c.life.Broken(); broken != nil { // another goroutine aborted
		return broken
	}
	if fault != nil {
		return fault
	}
	if c.end.isShut() { // the state of kernels is unknown
		return c.life.Err()
	}
	var named *comm.OpError
	if errors.As(err, &named) { // the error belongs to this communicator
		return named.Err
	}
	return err
}

// SyncCommStream implements [comm.StreamSyncOps].
func (c *Comm) SyncCommStream() error {
	return c.Sync(context.Background())
}

// Abort implements [backend.Backend]. Kernels tell the kernels of other ranks, and the base tells their hosts the
// cause, if it can.
func (a adapter) Abort(ctx context.Context, cause error) {
	end := a.c.end
	stream := a.c.Stream()
	end.stopWaiting()
	notice, cancel := context.WithTimeout(ctx, noticeTime)
	defer cancel()
	told := end.leave(notice, stream) // before the base aborts, if the base has nothing in flight
	a.c.Communicator.Abort(cause)
	if !told {
		end.leave(ctx, stream)
	}
}

// Release implements [backend.Backend].
func (a adapter) Release(context.Context) error {
	a.c.leakAlarm.Stop()
	return errors.Join(a.c.discard(), a.c.Communicator.Close())
}

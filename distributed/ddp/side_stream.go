package ddp

import (
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/runtime"
)

// sideStream is where a [Gradients] works on buckets beside the backward pass, if
// the device does several streams of work at a time: it selects, exchanges and merges
// on its own stream, after an event of the compute stream for each bucket.
type sideStream struct {
	rt      runtime.Runtime // where the work is done
	compute uintptr         // the stream that gradients are computed on
	ops     comm.StreamSyncOps
	back    uintptr // the event of what was done here
}

// newSideStream returns a side stream of rt, or nil if there is none.
func newSideStream(rt runtime.Runtime, c comm.Communicator) (*sideStream, error) {
	of, ok := rt.(runtime.StreamForker)
	ops, has := comm.As[comm.StreamSyncOps](c)
	if !ok || !has || base.NewOrder(rt, c).Streams == nil {
		return nil, nil
	}
	own, err := of.ForkStream()
	if err != nil {
		return nil, err
	}
	b := &sideStream{rt: own, compute: rt.ComputeStream(), ops: ops}
	if b.back, err = ops.CreateEvent(); err != nil {
		return nil, errors.Join(err, own.Close())
	}
	return b, nil
}

// mark records in an event what the compute stream was given so far.
func (b *sideStream) mark(event uintptr) error {
	if b == nil {
		return nil
	}
	return b.ops.RecordOnStream(event, b.compute)
}

// follow lets the side stream's work from now on see what was there at the mark.
func (b *sideStream) follow(event uintptr) error {
	if b == nil {
		return nil
	}
	return b.ops.StreamWaitEvent(b.rt.ComputeStream(), event)
}

// join lets the compute stream's work from now on see what the side stream was given.
func (b *sideStream) join() error {
	if b == nil {
		return nil
	}
	if err := b.ops.RecordOnStream(b.back, b.rt.ComputeStream()); err != nil {
		return err
	}
	return b.ops.StreamWaitEvent(b.compute, b.back)
}

// catchUp is mark and follow.
func (b *sideStream) catchUp() error {
	if b == nil {
		return nil
	}
	if err := b.mark(b.back); err != nil {
		return err
	}
	return b.follow(b.back)
}

// close waits for the compute stream, which may use memory of the side stream, and gives
// all back.
func (b *sideStream) close() error {
	if b == nil {
		return nil
	}
	return errors.Join(b.catchUp(), b.rt.Close(), b.ops.DestroyEvent(b.back))
}

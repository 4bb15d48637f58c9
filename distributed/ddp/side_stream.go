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
	rt      runtime.Runtime    // where the work is done
	compute uintptr            // the stream that gradients are computed on
	ops     comm.StreamSyncOps // of the communicator
	back    uintptr            // the event of what was done here
}

// newSideStream returns a side stream of rt, or nil if there is none.
func newSideStream(rt runtime.Runtime, c comm.Communicator) (*sideStream, error) {
	forker, ok := rt.(runtime.StreamForker)
	ops, has := comm.As[comm.StreamSyncOps](c)
	if !ok || !has || base.NewOrder(rt, c).Streams == nil {
		return nil, nil
	}
	forked, err := forker.ForkStream()
	if err != nil {
		return nil, err
	}
	s := &sideStream{
		rt:      forked,
		compute: rt.ComputeStream(),
		ops:     ops,
	}
	if s.back, err = ops.CreateEvent(); err != nil {
		return nil, errors.Join(err, forked.Close())
	}
	return s, nil
}

// mark records in an event what the compute stream was given so far.
func (s *sideStream) mark(event uintptr) error {
	if s == nil {
		return nil
	}
	return s.ops.RecordOnStream(event, s.compute)
}

// follow lets the side stream's work from now on see what was there at the mark.
func (s *sideStream) follow(event uintptr) error {
	if s == nil {
		return nil
	}
	return s.ops.StreamWaitEvent(s.rt.ComputeStream(), event)
}

// join lets the compute stream's work from now on see what the side stream was given.
func (s *sideStream) join() error {
	if s == nil {
		return nil
	}
	if err := s.ops.RecordOnStream(s.back, s.rt.ComputeStream()); err != nil {
		return err
	}
	return s.ops.StreamWaitEvent(s.compute, s.back)
}

// catchUp is mark and follow.
func (s *sideStream) catchUp() error {
	if s == nil {
		return nil
	}
	if err := s.mark(s.back); err != nil {
		return err
	}
	return s.follow(s.back)
}

// close waits for the compute stream, which may use memory of the side stream, and gives
// all back.
func (s *sideStream) close() error {
	if s == nil {
		return nil
	}
	return errors.Join(s.catchUp(), s.rt.Close(), s.ops.DestroyEvent(s.back))
}

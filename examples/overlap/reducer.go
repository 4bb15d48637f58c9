package main

import (
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// reducer adds up gradients over all ranks while the stream that computes them
// goes on with the next. The host submits everything and waits for nothing: an
// event makes the communicator's stream wait for a gradient, and another one
// makes the compute stream wait for the sums.
type reducer struct {
	comm    comm.Communicator
	streams comm.StreamSyncOps // the same communicator's
	compute uintptr            // the stream that gradients are computed on
	event   uintptr
}

// newReducer makes a reducer of the gradients that are computed on a stream.
func newReducer(c comm.Communicator, compute uintptr) (*reducer, error) {
	streams, ok := comm.AsStreamSync(c)
	if !ok {
		return nil, errors.New("the communicator has no streams")
	}
	event, err := streams.CreateEvent()
	if err != nil {
		return nil, err
	}
	return &reducer{comm: c, streams: streams, compute: compute, event: event}, nil
}

// add submits the sum of a gradient, whose computation was submitted before. It
// is in place.
func (r *reducer) add(gradient uintptr, count int, dt dtype.DType) error {
	if err := r.streams.RecordOnStream(r.event, r.compute); err != nil {
		return err
	}
	if err := r.streams.CommStreamWaitEvent(r.event); err != nil {
		return err
	}
	return r.comm.AllReduce(gradient, gradient, count, dt, comm.Sum)
}

// wait makes what is submitted to the compute stream later wait for all sums so
// far: the update of the weights.
func (r *reducer) wait() error {
	if err := r.streams.RecordOnCommStream(r.event); err != nil {
		return err
	}
	return r.streams.StreamWaitEvent(r.compute, r.event)
}

// close frees the event, which is allowed while a stream waits for it.
func (r *reducer) close() error { return r.streams.DestroyEvent(r.event) }

package main

import (
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// reducer sums gradients over all ranks while the stream that computes them continues with the next. The host submits
// all work and waits for nothing: the communicator's stream waits for a gradient, and the compute stream for the
// sums.
type reducer struct {
	comm    comm.Communicator // of this GPU
	order   comm.StreamOrder  // the same communicator's
	compute uintptr           // stream that computes gradients
}

// newReducer makes a reducer of the gradients computed on a stream.
func newReducer(c comm.Communicator, compute uintptr) (*reducer, error) {
	order, ok := comm.As[comm.StreamOrder](c)
	if !ok {
		return nil, errors.New("the communicator has no streams")
	}
	return &reducer{c, order, compute}, nil
}

// add submits the sum of a gradient whose computation has been submitted. The sum is in place.
func (r *reducer) add(gradient uintptr, count int, dt dtype.DType) error {
	if err := r.order.CommAfter(r.compute); err != nil {
		return err
	}
	return r.comm.AllReduce(gradient, gradient, count, dt, comm.Sum)
}

// wait makes later work on the compute stream, the update of the weights, wait for all sums so far.
func (r *reducer) wait() error { return r.order.AfterComm(r.compute) }

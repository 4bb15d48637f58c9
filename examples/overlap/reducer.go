package main

import (
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// reducer adds up gradients over all ranks while the stream that computes them
// goes on with the next. The host submits everything and waits for nothing: the
// communicator's stream waits for a gradient, and the compute stream for the sums.
type reducer struct {
	comm    comm.Communicator // of this GPU
	order   comm.StreamOrder  // the same communicator's
	compute uintptr           // the stream that gradients are computed on
}

// newReducer makes a reducer of the gradients that are computed on a stream.
func newReducer(c comm.Communicator, compute uintptr) (*reducer, error) {
	order, ok := comm.As[comm.StreamOrder](c)
	if !ok {
		return nil, errors.New("the communicator has no streams")
	}
	return &reducer{c, order, compute}, nil
}

// add submits the sum of a gradient, whose computation was submitted before. It
// is in place.
func (r *reducer) add(gradient uintptr, count int, dt dtype.DType) error {
	if err := r.order.CommAfter(r.compute); err != nil {
		return err
	}
	return r.comm.AllReduce(gradient, gradient, count, dt, comm.Sum)
}

// wait makes what is submitted to the compute stream later wait for all sums so
// far: the update of the weights.
func (r *reducer) wait() error { return r.order.AfterComm(r.compute) }

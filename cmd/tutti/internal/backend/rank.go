package backend

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Rank is what the code of one rank works with.
type Rank struct {
	Comm comm.Communicator
	// Runtime owns memory that Comm reaches.
	Runtime runtime.Runtime
}

// Reduce reduces values element by element over all ranks of r and returns the
// result, for the few numbers that a command collects from its ranks. It is
// collective.
func Reduce[T dtype.Element](ctx context.Context, r Rank, values []T, op comm.ReduceOp) (_ []T, err error) {
	tensor, err := runtime.FromSlice(r.Runtime, values)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, tensor.Free()) }()
	if err := distributed.AllReduce(ctx, r.Comm, tensor, op); err != nil {
		return nil, err
	}
	return runtime.ToSlice[T](tensor)
}

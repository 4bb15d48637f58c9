package local

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// split takes part in a Split. Its result is this rank's endpoint of the new world.
func (e *endpoint) split(ctx context.Context, w comm.Wait) (*endpoint, error) {
	sc := &splitCall{Wait: w}
	err := e.meet(ctx, comm.OpSplit, sc)
	if err != nil && sc.child != nil { // it broke before this rank could use the result
		sc.child.depart()
		return nil, err
	}
	return sc.child, err
}

// meet submits a collective that moves nothing and waits for it.
func (e *endpoint) meet(ctx context.Context, op comm.Op, split *splitCall) error {
	if err := e.submit(&comm.Call{Op: op}, split); err != nil {
		return err
	}
	return e.settle(ctx)
}

package local

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// split takes part in a Split. Its result is this rank's endpoint of the new world.
func (e *endpoint) split(ctx context.Context, w comm.Wait) (*endpoint, error) {
	sc := &splitCall{Wait: w, forsake: (*endpoint).forsake}
	err := e.meet(ctx, comm.OpSplit, sc)
	if err == nil {
		return sc.child.Load(), nil
	}
	if child := sc.child.Swap(e); child != nil {
		child.forsake(err)
	}
	return nil, err
}

// forsake is the end of an endpoint whose rank's Split has failed. Other ranks may have theirs.
func (e *endpoint) forsake(cause error) {
	e.world.abort(e, cause, cause)
	e.depart()
}

// meet submits a collective that moves nothing and waits for it.
func (e *endpoint) meet(ctx context.Context, op comm.Op, split *splitCall) error {
	if err := e.submit(&comm.Call{Op: op}, split, nil); err != nil {
		return err
	}
	return e.finish(ctx)
}

package local

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// splitCall is one rank's part in a Split.
type splitCall struct {
	comm.Wait
	child *endpoint // the result, nil for a negative color
}

// split takes part in a Split. Its result is this rank's endpoint of the new world.
func (e *endpoint) split(ctx context.Context, w comm.Wait) (*endpoint, error) {
	sc := &splitCall{Wait: w}
	err := e.meet(ctx, comm.OpSplit, sc)
	if err != nil && sc.child != nil { // it broke before this rank could use the result
		sc.child.depart()
		return nil, err
	}
	if sc.child != nil {
		e.root.remember(sc.child)
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

// split makes the worlds that the ranks of a Split asked for.
func (w *world) split(s *slot) {
	splits := make([]comm.Wait, w.size)
	for r := range s.extras {
		splits[r] = s.extras[r].split.Wait
	}
	for _, ranks := range comm.SplitGroups(splits) {
		child := newWorld(len(ranks), w.spins, w.options) // as many ranks as before
		for i, r := range ranks {
			child.ranks[i].root = w.ranks[r].root
			s.extras[r].split.child = child.ranks[i]
		}
	}
	for r := range s.extras {
		s.extras[r].split = nil
	}
}

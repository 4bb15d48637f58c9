package local

import (
	"cmp"
	"context"
	"slices"

	"github.com/tutti-go/tutti/comm"
)

// splitCall is one rank's part in a Split.
type splitCall struct {
	color, key int
	child      *communicator // the result, nil for a negative color
}

func (e *endpoint) split(ctx context.Context, color, key int) (*communicator, error) {
	sc := &splitCall{color: color, key: key}
	err := e.rendezvous(ctx, comm.OpSplit, sc)
	if sc.child == nil {
		return nil, err
	}
	if err != nil { // it broke before this rank could use the result
		sc.child.e.depart()
		return nil, err
	}
	e.root.remember(sc.child.e)
	return sc.child, nil
}

// split makes the worlds that the ranks of a Split asked for.
func (w *world) split(s *slot) {
	members := map[int][]int{}
	for r := range s.extras {
		if color := s.extras[r].split.color; color >= 0 {
			members[color] = append(members[color], r)
		}
	}
	for _, ranks := range members {
		slices.SortStableFunc(ranks, func(a, b int) int {
			return cmp.Compare(s.extras[a].split.key, s.extras[b].split.key)
		})
		child := newWorld(len(ranks), w.spins, w.options) // as many ranks as before
		for i, r := range ranks {
			child.ranks[i].root = w.ranks[r].root
			s.extras[r].split.child = newCommunicator(child.ranks[i])
		}
	}
	for r := range s.extras {
		s.extras[r].split = nil
	}
}

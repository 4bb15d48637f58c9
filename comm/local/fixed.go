package local

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/internal/reductions"
)

// agreeOnSums checks that all ranks have the same sums, if the collective is an allreduce in fixed point.
func (s *slot) agreeOnSums() error {
	if s.calls[0].reduce != reductions.FixedPoint {
		return nil
	}
	first := s.extras[0].sums
	for r := range s.extras {
		sums := s.extras[r].sums
		agreed := len(sums) == len(first)
		for i := range sums {
			agreed = agreed && sums[i].Agrees(&first[i])
		}
		if !agreed {
			return fmt.Errorf("%w: %v, of other arrays on rank %d than on rank 0", comm.ErrMismatch, &s.calls[0], r)
		}
	}
	return nil
}

// addSums makes a row of each array, of whole blocks.
func (s *slot) addSums() {
	p := &s.plan
	for i := range s.extras[0].sums {
		blocks := (s.extras[0].sums[i].N + fixedpoint.Block - 1) / fixedpoint.Block
		p.total += blocks * fixedpoint.Block
		p.ends = append(p.ends, p.total)
	}
}

// sumFixed sums n elements of an array, from an offset on, or those that it has of them.
func (s *slot) sumFixed(row, offset, n int, w *scratch) {
	sums := w.sums[:0]
	for r := range s.extras {
		sums = append(sums, &s.extras[r].sums[row])
	}
	w.worker.Reduce(sums, offset, min(offset+n, sums[0].N), s.plan.streaming)
	clear(sums)
}

// forgetSums leaves the ranks their arrays, when the collective is done, and lets them know that it is.
func (s *slot) forgetSums(ranks []*endpoint) {
	if s.calls[0].reduce == reductions.FixedPoint {
		for r := range s.extras {
			s.extras[r].sums = nil
			ranks[r].reduced.Store(true)
		}
	}
}

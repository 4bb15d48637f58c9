package base

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

// Disjoint returns an error if two of the contiguous tensors share memory. role names them in the error.
func Disjoint(role string, tensors []*runtime.Tensor) error {
	spans := make([]span, len(tensors))
	order := make([]int32, 0, len(tensors))
	for i, t := range tensors {
		from, err := t.Ptr()
		if err != nil {
			return fmt.Errorf("%s %d: %w", role, i, err)
		}
		if t.Bytes() > 0 {
			spans[i] = span{from: from, to: from + uintptr(t.Bytes())}
			order = append(order, int32(i))
		}
	}
	slices.SortFunc(order, func(i, j int32) int {
		return cmp.Compare(spans[i].from, spans[j].from)
	})
	for p := 1; p < len(order); p++ {
		i := order[p-1]
		j := order[p]
		if spans[i].to > spans[j].from {
			return OverlapError(role, int(i), int(j))
		}
	}
	return nil
}

// OverlapError returns [comm.ErrArgument] for two tensors that share memory.
func OverlapError(role string, i, j int) error {
	return fmt.Errorf("%w: %ss %d and %d share memory; pass a tensor once", comm.ErrArgument, role, min(i, j), max(i, j))
}

// Spans finds tensors of a step that share memory. Tensors usually keep their address from step to step, which costs
// two comparisons each.
type Spans struct {
	spans   []span  // by tensor
	order   []int32 // tensors with elements, by address; they share no memory
	current uint64  // the number of the step
}

// span is the memory of a tensor.
type span struct {
	from, to uintptr // to is the address after the last byte; if equal, the tensor is not in order
	step     uint64  // the step in which it was placed last
}

// NewSpans returns Spans for n tensors.
func NewSpans(n int) *Spans {
	return &Spans{
		spans:   make([]span, n),
		order:   make([]int32, 0, n),
		current: 1,
	}
}

// NextStep begins a step, in which no tensor is placed yet.
func (s *Spans) NextStep() { s.current++ }

// Place places tensor i in this step. It returns the number of another tensor of this step that shares memory with it,
// -1 if there is none.
func (s *Spans) Place(i int, t *runtime.Tensor) (overlap int, err error) {
	from, err := t.Ptr()
	if err != nil {
		return -1, err
	}
	to := from + uintptr(t.Bytes())
	x := &s.spans[i]
	x.step = s.current
	if x.from == from && x.to == to {
		return -1, nil
	}
	s.remove(i)
	for from < to {
		overlap := s.Find(from, to)
		if overlap < 0 {
			break
		}
		if s.spans[overlap].step == s.current {
			return overlap, nil
		}
		s.remove(overlap) // placed in an earlier step: it has moved, or takes no part
	}
	if from < to {
		x.from = from
		x.to = to
		s.order = slices.Insert(s.order, s.position(from), int32(i))
	}
	return -1, nil
}

// Find returns the number of a tensor with bytes in [from, to), -1 if there is none.
func (s *Spans) Find(from, to uintptr) int {
	p := s.position(from)
	if p > 0 {
		before := int(s.order[p-1])
		if s.spans[before].to > from {
			return before
		}
	}
	if p < len(s.order) {
		next := int(s.order[p])
		if s.spans[next].from < to {
			return next
		}
	}
	return -1
}

// position returns the number of tensors in the order that begin before an address.
func (s *Spans) position(from uintptr) int {
	p, _ := slices.BinarySearchFunc(s.order, from, func(i int32, from uintptr) int {
		return cmp.Compare(s.spans[i].from, from)
	})
	return p
}

// remove removes a tensor from the order, if it is there.
func (s *Spans) remove(i int) {
	x := &s.spans[i]
	if x.from == x.to {
		return
	}
	p := s.position(x.from)
	s.order = slices.Delete(s.order, p, p+1)
	x.from = 0
	x.to = 0
}

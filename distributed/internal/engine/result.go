package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// SelectedEntries returns the entries that this rank selected in the last step: gradient + residual, not divided by
// anything. They are no longer in its residual unless the exchange gave them back. Unless [Config].Values is F32 they
// may be rounded, as they were sent, or not. There are none after a step that sent everything or nothing. They are
// valid until the next step.
func (s *Reducer) SelectedEntries() (kernel.Entries, error) {
	if err := s.usable("selected"); err != nil {
		return kernel.Entries{}, err
	}
	return s.selected, nil
}

// Entries returns the average that the last step made as a list, with ascending indices, until the next step.
func (s *Reducer) Entries() (kernel.Entries, error) {
	const op = "entries"
	if err := s.listed(op); err != nil {
		return kernel.Entries{}, err
	}
	n := 0
	for _, l := range s.result.lists {
		n = min(n+l.N, s.n)
	}
	all := s.message(&s.entries, n)
	s.union(all, s.result.lists, s.result.scale, 0)
	return all, base.OpError(op, s.failure())
}

// AddResult adds the average that the last step made to t, multiplied by factor. Only its entries are touched.
func (s *Reducer) AddResult(t *runtime.Tensor, factor float32) error {
	const op = "add result"
	ptr, err := s.resultTarget(op, t)
	if err != nil {
		return err
	}
	for _, l := range s.result.lists {
		s.do(func() error {
			return s.kernels.ScatterAdd(s.array(ptr), l, s.result.scale*factor)
		})
	}
	return base.OpError(op, s.failure())
}

// Read waits for the device until ctx is done, and copies a list that
// [Reducer.Entries] or [Reducer.SelectedEntries] returned.
func (s *Reducer) Read(ctx context.Context, l kernel.Entries) (indices []int32, values []float32, err error) {
	const op = "read entries"
	if err := s.usable(op); err != nil {
		return nil, nil, err
	}
	s.read(ctx)
	if err := s.failure(); err != nil {
		return nil, nil, base.OpError(op, err)
	}
	n, err := s.lengthOf(l)
	if err != nil || n == 0 {
		return nil, nil, err
	}
	indices = make([]int32, n)
	values = make([]float32, n)
	err = errors.Join(s.rt.CopyOut(hostmem.Bytes(indices), l.Idx), s.rt.CopyOut(hostmem.Bytes(values), l.Val))
	return indices, values, base.OpError(op, err)
}

// listed reports why there is no result as a list.
func (s *Reducer) listed(op string) error {
	if err := s.usable(op); err != nil {
		return err
	}
	switch {
	case s.configured.Pattern == sparsity.Auto: // also where a sparse pattern was chosen: no program may depend on that
		return base.OpError(op, fmt.Errorf("%w: results of pattern %s are in the tensor, as it may choose %s",
			comm.ErrUnsupported, sparsity.Auto, sparsity.Dense))
	case s.result.dense != 0:
		return base.OpError(op, fmt.Errorf("%w: the last step's result is dense, and in the tensor", comm.ErrUnsupported))
	}
	return nil
}

// usable reports why nothing can be said of the last step.
func (s *Reducer) usable(op string) error {
	return base.OpError(op, inOrder(s.ready, s.learn))
}

// resultTarget checks a tensor that the result goes to, and returns its address.
func (s *Reducer) resultTarget(op string, t *runtime.Tensor) (uintptr, error) {
	if err := s.listed(op); err != nil {
		return 0, err
	}
	ptr, err := s.checkTensor(op, t)
	if err == nil && t.DType() != dtype.F32 {
		err = base.OpError(op, fmt.Errorf("%w: tensor is %v, want f32", comm.ErrUnsupported, t.DType()))
	}
	return ptr, err
}

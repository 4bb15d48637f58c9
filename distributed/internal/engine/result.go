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
// anything. They are no longer in its residual unless the exchange restored them. Unless [Config].Values is F32 they
// may be rounded, as they were sent, or not. There are none after a step that sent everything or nothing. They are
// valid until the next step.
func (s *Reducer) SelectedEntries() (kernel.Entries, error) {
	if err := s.usable("selected"); err != nil {
		return kernel.Entries{}, err
	}
	return s.selected, nil
}

// Entries returns the average of the last step as a list with ascending indices, valid until the next step.
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

// AddResult adds the average of the last step to t, multiplied by factor. It accesses only the result's entries.
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

// Read waits for the device, until ctx ends, and copies a list that [Reducer.Entries] or [Reducer.SelectedEntries]
// returned.
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

// listed returns the reason why there is no result as a list.
func (s *Reducer) listed(op string) error {
	if err := s.usable(op); err != nil {
		return err
	}
	switch {
	case s.configured.Pattern == sparsity.Auto: // even if a sparse pattern was chosen, so that no program depends on it
		return base.OpError(op, fmt.Errorf("%w: results of pattern %s are in the tensor, as it may choose %s",
			comm.ErrUnsupported, sparsity.Auto, sparsity.Dense))
	case s.result.dense != 0:
		return base.OpError(op, fmt.Errorf("%w: the last step's result is dense, and in the tensor", comm.ErrUnsupported))
	}
	return nil
}

// usable returns the reason why nothing is known about the last step.
func (s *Reducer) usable(op string) error {
	return base.OpError(op, inOrder(s.ready, s.learn))
}

// resultTarget checks a tensor for the result, and returns its address.
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

// Package gorgonia makes programs of Gorgonia (https://gorgonia.org) data parallel. A solver averages gradients over
// the ranks of a tutti communicator, in place, before another one uses them. README.md has a program before and
// after.
package gorgonia

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	_ "go4.org/unsafe/assume-no-moving-gc" // a version that does not stop programs of newer Go versions
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Solver averages gradients over ranks before a solver of Gorgonia uses them.
type Solver struct {
	ctx   context.Context // of the training: Step has none
	inner gorgonia.Solver // makes the updates
	rt    *cpu.Runtime    // of gradients on the host
	sync  *ddp.Gradients  // averages gradients; nil before the first step
	names []string        // of the parameters
}

// New gives all ranks rank 0's parameters. It returns a solver that averages gradients over the ranks of c as cfg
// says, densely by default, and leaves the update to inner. ctx ends waits for other ranks. All ranks pass the same.
func New(
	ctx context.Context,
	c comm.Communicator,
	inner gorgonia.Solver,
	parameters gorgonia.Nodes,
	cfg ddp.Config,
) (*Solver, error) {
	s := &Solver{
		ctx:   ctx,
		inner: inner,
		rt:    cpu.New(),
	}
	values := make([]gorgonia.Value, len(parameters))
	for i, p := range parameters {
		values[i] = p.Value()
		s.names = append(s.names, p.Name())
	}
	err := s.with(values, func(tensors []*runtime.Tensor) (err error) {
		if err = distributed.BroadcastAll(ctx, c, tensors, 0); err == nil {
			s.sync, err = ddp.New(ctx, s.rt, c, tensors, cfg)
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(s.named(err), s.Close())
	}
	return s, nil
}

// Step implements gorgonia.Solver, for the parameters of New, in their order.
func (s *Solver) Step(model []gorgonia.ValueGrad) error {
	gradients := make([]gorgonia.Value, len(model))
	for i, m := range model {
		var err error
		if gradients[i], err = m.Grad(); err != nil {
			return err
		}
	}
	err := s.with(gradients, func(tensors []*runtime.Tensor) error {
		return s.sync.ReduceAll(s.ctx, tensors)
	})
	if err != nil {
		return s.named(err)
	}
	return s.inner.Step(model)
}

// Stats returns the statistics of [ddp.Gradients] for the last step.
func (s *Solver) Stats() (ddp.Stats, error) { return s.sync.Stats(s.ctx) }

// State returns the state that the reduction keeps between steps ([ddp.Gradients.State]: residuals of sparse
// patterns, momentum). Each rank saves its own, beside the parameters.
func (s *Solver) State() ([]byte, error) { return s.sync.State(s.ctx) }

// Restore continues from states that [Solver.State] returned, together with the parameters of the same step. It takes
// the rank's own state or, if the number of ranks has changed, the states named by sparse.RestoreRanks
// ([ddp.Gradients.Restore]).
func (s *Solver) Restore(states ...[]byte) error { return s.sync.Restore(s.ctx, states...) }

// Close frees memory. The communicator stays open.
func (s *Solver) Close() error {
	var err error
	if s.sync != nil {
		err = s.sync.Close()
	}
	return errors.Join(err, s.rt.Close())
}

// Outer is a rank's own solver, followed by an outer loop that averages the movement of the ranks' parameters.
// Package outer describes the loop: Adopt before an evaluation of the model, State, Restore, Stats.
type Outer struct {
	*outer.Loop
	solver  *Solver           // without a reduction
	tensors []*runtime.Tensor // the parameters
}

// NewOuter gives all ranks rank 0's parameters, of type F32. It returns a solver that leaves steps to inner and
// exchanges with the ranks of c as cfg says. ctx ends waits for other ranks. All ranks pass the same. The parameters'
// memory is pinned until Close.
func NewOuter(
	ctx context.Context,
	c comm.Communicator,
	inner gorgonia.Solver,
	parameters gorgonia.Nodes,
	cfg outer.Config,
) (*Outer, error) {
	o := &Outer{solver: &Solver{
		ctx:   ctx,
		inner: inner,
		rt:    cpu.New(),
	}}
	for _, p := range parameters {
		o.solver.names = append(o.solver.names, p.Name())
	}
	var err error
	for i, p := range parameters {
		var t *runtime.Tensor
		if t, err = Wrap(o.solver.rt, p.Value()); err != nil {
			err = &distributed.TensorError{Role: "parameter", Index: i, Err: err}
			break
		}
		o.tensors = append(o.tensors, t)
	}
	if err == nil {
		err = distributed.BroadcastAll(ctx, c, o.tensors, 0)
	}
	if err == nil {
		o.Loop, err = outer.New(ctx, o.solver.rt, c, o.tensors, cfg)
	}
	if err != nil {
		return nil, errors.Join(o.solver.named(err), o.Close())
	}
	return o, nil
}

// Step implements gorgonia.Solver for the parameters of NewOuter. A step of inner counts once: after an error of the
// exchange, o.Loop.Step repeats only the exchange.
func (o *Outer) Step(model []gorgonia.ValueGrad) error {
	if err := o.solver.inner.Step(model); err != nil {
		return err
	}
	return o.Loop.Step(o.solver.ctx)
}

// Close frees memory. The communicator stays open, and the parameters stay as they are.
func (o *Outer) Close() error {
	var errs []error
	if o.Loop != nil {
		errs = append(errs, o.Loop.Close())
	}
	for _, t := range o.tensors {
		errs = append(errs, t.Free())
	}
	return errors.Join(append(errs, o.solver.Close())...)
}

// named adds the parameter's name to an error about one of several tensors.
func (s *Solver) named(err error) error {
	var tensorErr *distributed.TensorError
	if errors.As(err, &tensorErr) && tensorErr.Index < len(s.names) {
		return fmt.Errorf("gorgonia: %s: %w", s.names[tensorErr.Index], err)
	}
	return err
}

// with calls use with tensors of the values' memory.
func (s *Solver) with(values []gorgonia.Value, use func([]*runtime.Tensor) error) (err error) {
	tensors := make([]*runtime.Tensor, len(values))
	for i, v := range values {
		if tensors[i], err = Wrap(s.rt, v); err != nil {
			return &distributed.TensorError{Role: "parameter", Index: i, Err: err}
		}
		defer tensors[i].Free()
	}
	return use(tensors)
}

// Wrap makes a tensor of the memory of a value without a copy. The value is a *tensor.Dense without gaps, or a scalar
// of 32 or 64 bits. Its memory is pinned until the tensor is freed.
func Wrap(rt *cpu.Runtime, v gorgonia.Value) (*runtime.Tensor, error) {
	switch x := v.(type) {
	case *tensor.Dense:
		if x.RequiresIterator() || !x.IsNativelyAccessible() {
			return nil, fmt.Errorf("%w: tensor of shape %v with strides %v", runtime.ErrNotContiguous, x.Shape(), x.Strides())
		}
		dt, err := dtype.Parse(x.Dtype().Name())
		if err != nil {
			return nil, err
		}
		return cpu.WrapBytes(rt, x.Raw, dt, x.Shape()...)
	case *gorgonia.F32:
		return cpu.Wrap(rt, unsafe.Slice((*float32)(x), 1))
	case *gorgonia.F64:
		return cpu.Wrap(rt, unsafe.Slice((*float64)(x), 1))
	}
	return nil, fmt.Errorf("%w: a value of type %T", comm.ErrUnsupported, v)
}

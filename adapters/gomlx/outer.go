package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Outer is each rank's own optimizer, followed by an outer loop that averages the movement of the ranks' trainable
// variables ([outer.Loop]). GoMLX moves variables from step to step, so Outer keeps a copy of them.
type Outer struct {
	optimizer.Interface
	world
	cfg   outer.Config // as passed
	loop  *outer.Loop  // nil before the first step
	saved [][]byte     // argument of Restore before the first step

	variables []*model.Variable // the trained variables, in the order common to all ranks
	copies    [][]byte          // copies of their values, which the loop changes
	tensors   []*runtime.Tensor // the copies
}

// NewOuter returns an optimizer that leaves steps to inner and exchanges with the ranks of c as cfg says. ctx ends
// waits for other ranks. All ranks pass the same.
func NewOuter(ctx context.Context, c comm.Communicator, inner optimizer.Interface, cfg outer.Config) *Outer {
	return &Outer{
		Interface: inner,
		world:     world{ctx, c, cpu.New()},
		cfg:       cfg,
	}
}

// UpdateGraph implements optimizer.Interface.
func (o *Outer) UpdateGraph(s *model.Scope, g *graph.Graph, loss *graph.Node) {
	o.variables = inOrder(slices.DeleteFunc(trainable(s, g), func(v *model.Variable) bool { return !differentiable(v) }))
	o.Interface.UpdateGraph(s, g, loss)
}

// Attach makes loop exchange after each step. The first step makes the variables; after it all ranks get rank 0's.
func (o *Outer) Attach(loop *train.Loop) {
	o.attach(loop, func() error {
		if o.loop == nil {
			return o.begin(loop.Trainer.Store())
		}
		return o.around(func() error { return o.loop.Step(o.ctx) })
	})
}

// begin makes the loop from the variables of the first step.
func (o *Outer) begin(store *model.Store) error {
	if o.saved == nil {
		if err := o.broadcast(slices.Collect(store.IterVariables())); err != nil {
			return err
		}
	}
	for _, v := range o.variables {
		value, err := v.Value()
		if err != nil {
			return err
		}
		dt, err := dtype.Parse(value.DType().String())
		if err != nil {
			return fmt.Errorf("gomlx: variable %s: %w", v.Path(), err)
		}
		memory := make([]byte, value.Shape().ByteSize())
		t, err := cpu.WrapBytes(o.rt, memory, dt, value.Shape().Dimensions...)
		if err != nil {
			return err
		}
		o.copies = append(o.copies, memory)
		o.tensors = append(o.tensors, t)
	}
	return o.around(func() (err error) {
		if o.loop, err = outer.New(o.ctx, o.rt, o.c, o.tensors, o.cfg); err == nil && o.saved != nil {
			err = o.loop.Restore(o.ctx, o.saved...)
		}
		if err != nil || o.saved == nil { // a resumed training has begun before
			return named(err, o.variables)
		}
		return o.loop.Step(o.ctx)
	})
}

// around runs use with the variables in copies, and then stores the copies in the variables.
func (o *Outer) around(use func() error) error {
	forEach := func(f func(copied, data []byte)) error {
		for i, v := range o.variables {
			value, err := v.Value()
			if err == nil {
				err = mutable(value, func(data []byte) { f(o.copies[i], data) })
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	err := forEach(func(copied, data []byte) { copy(copied, data) })
	if err == nil {
		err = use()
	}
	return errors.Join(err, forEach(func(copied, data []byte) { copy(data, copied) }))
}

// Adopt sets the variables to the common ones of all ranks ([outer.Loop.Adopt]), before an evaluation of the model.
// Before the first step, which makes the variables, it returns [comm.ErrArgument].
func (o *Outer) Adopt() error {
	if o.loop == nil {
		return fmt.Errorf("gomlx: %w: adopt before the first step", comm.ErrArgument)
	}
	return o.around(o.loop.Adopt)
}

// Loop returns the outer loop, for Stats and Hash; nil before the first step.
func (o *Outer) Loop() *outer.Loop { return o.loop }

// State returns the state that the loop keeps between steps ([outer.Loop.State]), nil before the first. Each rank
// saves its own, beside its variables.
func (o *Outer) State() ([]byte, error) {
	if o.loop == nil {
		return nil, nil
	}
	return o.loop.State(o.ctx)
}

// Restore continues from states that [Outer.State] returned, together with the rank's variables of the same step. It
// is called before the first step of the loop ([outer.Loop.Restore]), which reports errors.
func (o *Outer) Restore(states ...[]byte) { o.saved = states }

// Close frees memory. The communicator stays open, and the variables stay as they are.
func (o *Outer) Close() error {
	var errs []error
	if o.loop != nil {
		errs = append(errs, o.loop.Close())
	}
	for _, t := range o.tensors {
		errs = append(errs, t.Free())
	}
	return errors.Join(append(errs, o.rt.Close())...)
}

package ddp

import (
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// held is the contributions of a gradient that wait for the last one of the step.
type held struct {
	tensors []*runtime.Tensor // reused
	n       int               // how many of them there are in this step
}

// contribute takes a contribution of gradient i that is not the last one of this rank. Wait rolls a step back of which
// one could not be kept.
func (g *Gradients) contribute(i int, t *runtime.Tensor) error {
	if g.heldRolledBack {
		if err := g.beginAnew(); err != nil {
			return err
		}
	}
	err := g.hold(i, t)
	if err != nil {
		g.step.begun = true
		g.fail(err)
	}
	return err
}

// hold keeps a copy of a contribution of gradient i until the step reduces it. With weights, that is its product with
// the weight, as F32.
func (g *Gradients) hold(i int, t *runtime.Tensor) error {
	h := &g.gradients[i].held
	if h.n == len(h.tensors) {
		dt := t.DType()
		if g.cfg.Weighted {
			dt = dtype.F32
		}
		c, err := runtime.New(g.rt, dt, t.Len())
		if err != nil {
			return err
		}
		h.tensors = append(h.tensors, c)
	}
	to, err := h.tensors[h.n].Ptr()
	if err != nil {
		return err
	}
	from, err := t.Ptr()
	if err != nil {
		return err
	}
	switch {
	case t.Bytes() == 0:
	case g.cfg.Weighted:
		err = g.multiply(to, from, t)
	default:
		err = g.rt.Copy(to, from, t.Bytes())
	}
	if err == nil {
		h.n++
	}
	return err
}

// multiply stores the product of a contribution, a tensor like t, and the weight of the pass.
func (g *Gradients) multiply(to, from uintptr, t *runtime.Tensor) error {
	kernels, err := kernel.Lookup(g.rt)
	if err != nil {
		return err
	}
	factor, err := g.roster.factor()
	if err != nil {
		return err
	}
	if err := g.rt.Fill(factor, 1, dtype.F32, g.weights.pass); err != nil {
		return err
	}
	if err := g.rt.Fill(to, t.Len(), dtype.F32, 0); err != nil {
		return err
	}
	return kernels.Accumulate(kernel.Source{
		X:      to,
		N:      t.Len(),
		Grad:   from,
		DType:  t.DType(),
		Factor: factor,
	})
}

// lastCounts reports whether the last contribution to a gradient, which is ready, is summed as it is: with weights, one
// of weight 0 counts for nothing, and if a weight is not 1 the product is held.
func (g *Gradients) lastCounts(param int) bool {
	return !g.step.absent[param] && (!g.cfg.Weighted || g.weights.pass == 1)
}

// holdLast keeps the last contribution of this rank to gradient i, if it is to be multiplied by a weight.
func (g *Gradients) holdLast(i int, t *runtime.Tensor) error {
	if g.step.absent[i] || g.lastCounts(i) || g.weights.pass == 0 {
		return nil
	}
	err := g.hold(i, t)
	g.step.folded[i] = err == nil
	return err
}

// dropLast leaves out what holdLast has kept, in a step that is rolled back: when it is repeated, it is ready again.
func (g *Gradients) dropLast() {
	for i := range g.gradients {
		if g.step.folded[i] {
			g.gradients[i].held.n--
			g.step.folded[i] = false
		}
	}
}

// beginAnew leaves out the contributions of a step that was rolled back, for a step that does not repeat it.
func (g *Gradients) beginAnew() error {
	for i := range g.gradients {
		if g.step.tensors[i] != nil && g.gradients[i].held.n > 0 {
			return fmt.Errorf("%w: gradient %d is ready with what it had in the step that was rolled back: begin another "+
				"step with Accumulate", comm.ErrArgument, i)
		}
	}
	g.forgetHeld()
	return nil
}

// forgetHeld leaves out the contributions of a step that has ended, or is not repeated.
func (g *Gradients) forgetHeld() {
	g.heldRolledBack = false
	for i := range g.gradients {
		g.gradients[i].held.n = 0
	}
}

// freeHeld gives the memory of contributions back: with other ranks, this one may have fewer.
func (g *Gradients) freeHeld() error {
	g.forgetHeld()
	var errs []error
	for i := range g.gradients {
		h := &g.gradients[i].held
		for _, t := range h.tensors {
			errs = append(errs, t.Free())
		}
		h.tensors = nil
	}
	return errors.Join(errs...)
}

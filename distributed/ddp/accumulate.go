package ddp

import (
	"cmp"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Accumulate adds t, a gradient of parameter i, to the gradient that the next [Gradients.Ready] of i, or Wait, reduces.
// It is for gradient accumulation over several backward passes, of which only the last communicates (no_sync in
// PyTorch). Accumulate does not communicate. Work submitted to the compute stream afterwards may overwrite t.
//
// With [Config.Weighted] it adds gradients times their weights, and the step reduces the mean over all of them
// ([Gradients.Weigh]).
//
// The sum is kept in F32, whatever type the gradient has (F32, F16 or BF16, [comm.ErrUnsupported] otherwise), and
// rounded once. For the mean over n passes, divide the loss by n. A program that accumulates in its gradients does not
// need Accumulate, and calls Ready after the last pass only.
//
// With [Config.Reproducible] a copy of t is kept instead of a sum, in the type of the gradient.
//
// If a step is rolled back, or ended by [Gradients.Rebind], the sum is in the gradient that was ready. If none was
// ready, the sum is kept for the next one. With Reproducible, the next Accumulate discards all contributions of the
// step.
func (g *Gradients) Accumulate(i int, t *runtime.Tensor) error {
	const op = "gradient accumulate"
	if err := g.usable(op); err != nil {
		return err
	}
	if err := g.check(op, i, t); err != nil {
		return err
	}
	if err := base.CheckGradientType(t.DType()); err != nil {
		return base.OpError(op, gradientError(i, err))
	}
	if ready, err := g.readyAt(t); err != nil || ready >= 0 {
		return base.OpError(op, cmp.Or(err, base.OverlapError("gradient", ready, i)))
	}
	if err := g.needWeight(); err != nil {
		return base.OpError(op, err)
	}
	if g.cfg.Weighted {
		if g.weights.phase == kept {
			err := fmt.Errorf("%w: the step was rolled back: repeat it, or call Weigh", comm.ErrArgument)
			return base.OpError(op, err)
		}
		g.weights.phase = accumulating
		if g.weights.pass == 0 {
			return nil // it counts as zeros, whatever it is
		}
	}
	if g.cfg.Reproducible > 0 {
		return base.OpError(op, g.contribute(i, t))
	}
	if err := g.makeSum(i); err != nil {
		return base.OpError(op, err)
	}
	g.err = g.addTo(&g.gradients[i].sum, t)
	return base.OpError(op, g.err)
}

// makeSum makes the sum of gradient i, which is 0 unless something was accumulated.
func (g *Gradients) makeSum(i int) error {
	s := &g.gradients[i].sum
	if s.tensor == nil {
		total, err := runtime.New(g.rt, dtype.F32, g.gradients[i].n)
		if err != nil {
			return err
		}
		s.tensor = total
	}
	if s.accumulated {
		return nil
	}
	if err := s.tensor.Fill(0); err != nil {
		return err
	}
	s.accumulated = true
	return nil
}

// readyAt returns which gradient is ready in memory of t, and -1 if none is.
func (g *Gradients) readyAt(t *runtime.Tensor) (int, error) {
	p, err := t.Ptr()
	if err != nil {
		return -1, err
	}
	ready := g.spans.Find(p, p+uintptr(t.Bytes()))
	if ready >= 0 && g.step.tensors[ready] == nil {
		ready = -1
	}
	return ready, nil
}

// addTo adds a gradient to a sum, with the weight of the pass.
func (g *Gradients) addTo(s *sum, t *runtime.Tensor) error {
	var factor uintptr
	if g.cfg.Weighted {
		var err error
		factor, err = g.countPass()
		if err != nil {
			return err
		}
	}
	return g.onSum(s, t, func(k kernel.Kernels, x, grad uintptr) error {
		return k.Accumulate(kernel.Source{X: x, N: t.Len(), Grad: grad, DType: t.DType(), Factor: factor})
	})
}

// fold adds what was accumulated to the gradient that is reduced.
func (g *Gradients) fold(i int, t *runtime.Tensor) error {
	if g.cfg.Reproducible > 0 {
		return g.holdLast(i, t)
	}
	if g.cfg.Weighted {
		return g.foldWeighted(i, t)
	}
	s := &g.gradients[i].sum
	if !s.accumulated {
		return nil
	}
	if err := g.addTo(s, t); err != nil {
		return err
	}
	return g.storeSum(i, t, 1)
}

// foldWeighted makes the gradient that is reduced the mean over all passes of this rank.
func (g *Gradients) foldWeighted(i int, t *runtime.Tensor) error {
	s := &g.gradients[i].sum
	absent := g.step.absent[i]
	if g.empty() || s.whole {
		return nil
	}
	// Earlier passes count for a gradient that only the last one has.
	if !s.accumulated && (absent || g.weights.earlier == 0) {
		return nil
	}
	if err := g.makeSum(i); err != nil {
		return err
	}
	if !absent && g.weights.pass > 0 {
		if err := g.addTo(s, t); err != nil {
			return err
		}
	}
	return g.storeSum(i, t, float32(g.weights.unit/g.step.weight))
}

// storeSum moves a sum to the gradient that is reduced, scaled.
func (g *Gradients) storeSum(i int, t *runtime.Tensor, scale float32) error {
	s := &g.gradients[i].sum
	s.accumulated = false
	g.step.folded[i] = true
	return g.onSum(s, t, func(k kernel.Kernels, x, grad uintptr) error {
		return k.Store(grad, t.DType(), x, t.Len(), scale, 0)
	})
}

// unfold keeps the sums of gradients that were left out of a step that is rolled back or aborted.
func (g *Gradients) unfold() {
	if g.cfg.Reproducible > 0 {
		g.dropLast()
	}
	g.keepWeights()
	g.heldRolledBack = true
	for i := range g.gradients {
		s := &g.gradients[i].sum
		s.accumulated = s.accumulated || g.step.folded[i] && g.step.absent[i]
	}
}

// onSum calls a kernel with the addresses of a sum and a gradient, if they have
// elements.
func (g *Gradients) onSum(s *sum, t *runtime.Tensor, call func(k kernel.Kernels, x, grad uintptr) error) error {
	if t.Len() == 0 {
		return nil
	}
	kernels, err := kernel.Lookup(g.rt)
	if err != nil {
		return err
	}
	x, err := s.tensor.Ptr()
	if err != nil {
		return err
	}
	grad, err := t.Ptr()
	if err != nil {
		return err
	}
	return call(kernels, x, grad)
}

package engine

import (
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// addMomentum advances the velocity by a gradient, and returns it to be reduced instead of the gradient: momentum
// correction. The velocity follows the residual in memory, so that both are rolled back, saved and scaled together.
func (e *engine) addMomentum(g Input) Input {
	if e.cfg.Momentum == 0 || e.err != nil || e.n == 0 {
		return g
	}
	velocity := base.At(e.residual, e.n)
	before := base.At(e.residual, e.n)
	if e.origin != 0 {
		before = base.At(e.origin, e.n)
	}
	e.check(e.kernels.Store(velocity, dtype.F32, before, e.n, float32(e.cfg.Momentum), 0))
	e.do(func() error {
		return e.kernels.Accumulate(kernel.Source{
			X:      velocity,
			N:      e.n,
			Grad:   g.Ptr,
			DType:  g.DType,
			Factor: g.Factor,
		})
	})
	return Input{Ptr: velocity, DType: dtype.F32}
}

// mask clears the velocity of selected entries: momentum factor masking.
func (e *engine) mask(selected kernel.Entries) {
	if e.cfg.Momentum > 0 && e.err == nil && selected.Idx != 0 {
		e.check(e.kernels.ScatterZero(kernel.Array{Ptr: base.At(e.residual, e.n), N: e.n}, selected))
	}
}

package ddp

import (
	"github.com/tutti-go/tutti/runtime"
)

// convert copies n elements of a gradient to its place in a bucket, or back, and
// converts between the gradient's type and that which travels.
func (g *Gradients) convert(b *bucket, flat, gradient uintptr, n int, back bool) error {
	switch {
	case b.wire == b.dt && back:
		return g.runtime().Copy(gradient, flat, n*b.dt.Size())
	case b.wire == b.dt:
		return g.runtime().Copy(flat, gradient, n*b.dt.Size())
	case n == 0:
		return nil
	}
	kernels, err := runtime.KernelsOf(g.runtime())
	if err != nil {
		return err
	}
	if !back {
		return kernels.Store(flat, b.wire, gradient, n, 1, 0)
	}
	if err := g.runtime().Fill(gradient, n, b.dt, 0); err != nil {
		return err
	}
	return kernels.Accumulate(runtime.Source{X: gradient, N: n, Grad: flat, DType: b.wire})
}

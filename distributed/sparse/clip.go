package sparse

import (
	"context"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// clip has g multiplied by what bounds its norm as the configuration says, which
// it computes on the device.
func (s *Reducer) clip(ctx context.Context, g *Input) {
	if s.cfg.ClipNorm == 0 || s.n == 0 || s.err != nil {
		return
	}
	squares := s.at(numSquares)
	s.check(s.kernels.SumSquares(g.Ptr, g.DType, s.n, squares))
	g.Factor = s.clipFactor(ctx, squares, 1)
}

// clipFactor returns the address of what scales a gradient whose squared norm is
// the sum of m F64.
func (e *engine) clipFactor(ctx context.Context, squares uintptr, m int) uintptr {
	share, limit := 1.0, e.cfg.ClipNorm/math.Sqrt(float64(e.size))
	if e.cfg.Clip == ClipGlobal {
		e.communicate(ctx, comm.AllReduceCall(squares, squares, m, dtype.F64, comm.Sum))
		share, limit = 1/float64(e.size), e.cfg.ClipNorm
	}
	e.do(func() error { return e.kernels.ClipFactor(e.at(numFactor), squares, m, share, limit) })
	return e.at(numFactor)
}

package distributed

import (
	"context"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// clip has g multiplied by what bounds its norm as the configuration says, which
// it computes on the device.
func (s *Sparse) clip(ctx context.Context, g *gradient) {
	if s.cfg.ClipNorm == 0 || s.n == 0 || s.err != nil {
		return
	}
	squares, factor := s.at(numSquares), s.at(numFactor)
	s.check(s.kernels.SumSquares(g.ptr, g.dt, s.n, squares))
	share, limit := 1.0, s.cfg.ClipNorm/math.Sqrt(float64(s.size))
	if s.cfg.Clip == ClipGlobal {
		s.communicate(ctx, comm.AllReduceCall(squares, squares, 1, dtype.F64, comm.Sum))
		share, limit = 1/float64(s.size), s.cfg.ClipNorm
	}
	if s.err == nil {
		s.check(s.kernels.ClipFactor(factor, squares, share, limit))
	}
	g.factor = factor
}

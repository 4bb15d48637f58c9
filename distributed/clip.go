package distributed

import (
	"context"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// clip computes what bounds the gradient's norm as the configuration says, on
// the device: a factor by which it is to be multiplied. It returns the factor's
// address, 0 if nothing is to be clipped.
func (s *Sparse) clip(ctx context.Context, grad uintptr, dt dtype.DType) uintptr {
	if s.cfg.ClipNorm == 0 || s.n == 0 || s.err != nil {
		return 0
	}
	squares, factor := s.at(numSquares), s.at(numFactor)
	s.check(s.kernels.SumSquares(grad, dt, s.n, squares))
	share, limit := 1.0, s.cfg.ClipNorm/math.Sqrt(float64(s.size))
	if s.cfg.Clip == ClipGlobal {
		s.communicate(ctx, comm.AllReduceCall(squares, squares, 1, dtype.F64, comm.Sum))
		share, limit = 1/float64(s.size), s.cfg.ClipNorm
	}
	if s.err == nil {
		s.check(s.kernels.ClipFactor(factor, squares, share, limit))
	}
	return factor
}

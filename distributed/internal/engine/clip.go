package engine

import (
	"context"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// clip multiplies g by a factor that bounds its norm as the configuration says, computed on the device.
func (s *Reducer) clip(ctx context.Context, g *Input) {
	if s.cfg.ClipNorm == 0 || s.n == 0 || s.err != nil {
		return
	}
	squares := s.address(numSquares)
	share := 1.0
	limit := s.cfg.ClipNorm / math.Sqrt(float64(s.size))
	s.check(s.kernels.SumSquares(g.Ptr, g.DType, s.n, squares))
	if s.cfg.ClipGlobal {
		s.communicate(ctx, comm.AllReduceCall(squares, squares, 1, dtype.F64, comm.Sum))
		share = 1 / float64(s.size)
		limit = s.cfg.ClipNorm
	}
	g.Factor = s.address(numFactor)
	s.do(func() error {
		return s.kernels.ClipFactor(g.Factor, squares, 1, share, limit)
	})
}

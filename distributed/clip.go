package distributed

import (
	"context"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// clip bounds the gradient's norm as the configuration says. It returns where
// the clipped gradient is, and its type: an F32 gradient is scaled in place,
// others as an F32 copy in scratch memory.
func (s *Sparse) clip(ctx context.Context, grad uintptr, dt dtype.DType) (uintptr, dtype.DType) {
	if s.cfg.ClipNorm == 0 || s.n == 0 {
		return grad, dt
	}
	if dt != dtype.F32 {
		s.allocate(&s.scratch, s.n*wordSize)
		s.fill(s.scratch.ptr, s.n)
		s.accumulate(s.scratch.ptr, grad, dt)
		grad = s.scratch.ptr
	}
	if s.err != nil {
		return grad, dtype.F32
	}
	squares, err := s.kernels.SumSquares(grad, s.n)
	s.check(err)
	limit := s.cfg.ClipNorm
	if s.cfg.Clip == ClipGlobal {
		squares = s.sumOverRanks(ctx, squares) / float64(s.size)
	} else {
		limit /= math.Sqrt(float64(s.size))
	}
	if norm := math.Sqrt(squares); norm > limit && !math.IsInf(norm, 0) {
		s.scale(grad, s.n, float32(limit/norm))
	}
	return grad, dtype.F32
}

// sumOverRanks adds up one number of every rank.
func (s *Sparse) sumOverRanks(ctx context.Context, x float64) float64 {
	s.number[0] = x
	if s.err == nil {
		s.check(s.rt.CopyIn(s.words.ptr, hostmem.Bytes(s.number[:])))
	}
	s.fence(ctx)
	if s.err == nil {
		s.check(s.c.AllReduce(s.words.ptr, s.words.ptr, 1, dtype.F64, comm.Sum))
	}
	s.join(ctx)
	if s.err == nil {
		s.check(s.rt.CopyOut(hostmem.Bytes(s.number[:]), s.words.ptr))
	}
	return s.number[0]
}

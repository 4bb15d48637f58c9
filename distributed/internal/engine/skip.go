package engine

import (
	"context"
	"errors"
	"log/slog"
	"math"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// reportSkip logs that the ranks skip the step of a tensor that is no part of a transaction of several. The ranks
// whose own gradients are not finite say it, and rank 0 in any case. [Reducer.Stats] alone knows of the steps that the
// device judges.
func (s *Reducer) reportSkip() {
	finite, err := s.isFinite(s.gradient)
	if err == nil && finite && s.rank != 0 {
		return
	}
	text := "sparse: skipping a step on all ranks: the gradient of this rank is not finite"
	if finite {
		text = "sparse: skipping a step on all ranks: gradients of other ranks, or the sum, are not finite"
	}
	if times, due := s.skipLog.Count(text); due {
		slog.Warn(text, "rank", s.rank, "step", s.steps, "times", times)
	}
}

// isFinite reports whether all elements of a gradient are finite, for which the host waits. The squared norm that
// Stats may read stays.
func (s *Reducer) isFinite(g Input) (bool, error) {
	if err := s.order.HostAfterCompute(context.Background()); err != nil {
		return false, err
	}
	var before, square [1]float64
	word := s.address(numSquares)
	if err := s.rt.CopyOut(hostmem.Bytes(before[:]), word); err != nil {
		return false, err
	}
	if err := s.kernels.SumSquares(g.Ptr, g.DType, s.n, word); err != nil {
		return false, err
	}
	if err := s.order.HostAfterCompute(context.Background()); err != nil {
		return false, err
	}
	err := s.rt.CopyOut(hostmem.Bytes(square[:]), word)
	err = errors.Join(err, s.rt.CopyIn(word, hostmem.Bytes(before[:])))
	return !math.IsNaN(square[0]) && !math.IsInf(square[0], 0), err
}

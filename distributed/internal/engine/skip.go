package engine

import (
	"context"
	"errors"
	"log/slog"
	"math"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// reportSkip logs that the ranks skip the step of a tensor that is not part of a transaction. Ranks whose own
// gradients are not finite log it, and rank 0 in any case. Steps that the device judges appear only in
// [Reducer.Stats].
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

// isFinite reports whether all elements of a gradient are finite, for which the host waits. It does not change the
// squared norm that Stats may read.
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

package outer

import (
	"context"
	"log/slog"
	"math"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// reportSkip logs that the ranks skip a fragment. The ranks whose own parameters are not finite name these, and rank 0
// says it in any case.
func (l *Loop) reportSkip(ctx context.Context, f *fragment) {
	culprits, err := l.nonFinite(ctx, f)
	rank := l.c.Rank()
	if err == nil && len(culprits) == 0 && rank != 0 {
		return
	}
	text := "outer: all ranks go back to the common parameters: these parameters of this rank are not finite"
	if len(culprits) == 0 {
		text = "outer: all ranks go back to the common parameters: those of other ranks, or the sum, are not finite"
	}
	if times, due := l.skips.Count(text); due { // whichever they are: any round may have others
		slog.Warn(text, "rank", rank, "step", f.sent.Step, "parameters", culprits, "times", times)
	}
}

// nonFinite returns which parameters of a fragment are not finite on this rank.
func (l *Loop) nonFinite(ctx context.Context, f *fragment) (culprits []int, err error) {
	square := l.word(squareWord)
	i := 0
	err = l.visit(f, func(ptr uintptr, dt dtype.DType, offset, n int) error {
		number := f.params[i].number
		i++
		if err := l.kernels.SumSquares(ptr, dt, n, square); err != nil {
			return err
		}
		if err := l.order.HostAfterCompute(ctx); err != nil {
			return err
		}
		var sum [1]float64
		if err := l.rt.CopyOut(hostmem.Bytes(sum[:]), square); err != nil {
			return err
		}
		if math.IsNaN(sum[0]) || math.IsInf(sum[0], 0) {
			culprits = append(culprits, number)
		}
		return nil
	})
	return culprits, err
}

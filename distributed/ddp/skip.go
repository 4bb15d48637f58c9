package ddp

import (
	"context"
	"fmt"
	"log/slog"
	"math"

	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// skipInterval is how often a step waits for the device only to look whether it has skipped steps.
const skipInterval = 256

// reportSkip logs that the ranks skip the step that is being completed. The ranks whose own gradients are not finite
// name these, and rank 0 says it in any case: finite gradients may have a sum that is not.
func (g *Gradients) reportSkip(ctx context.Context) {
	culprits, err := g.nonFinite(ctx)
	rank := g.meter.Rank()
	if err == nil && len(culprits) == 0 && rank != 0 {
		return
	}
	text := "ddp: skipping a step on all ranks: these gradients of this rank are not finite"
	if len(culprits) == 0 {
		text = "ddp: skipping a step on all ranks: gradients of other ranks, or the sum, are not finite"
	}
	if times, due := g.skips.Count(text); due { // whichever they are: any step may have others
		slog.Warn(text, "rank", rank, "step", g.steps, "gradients", culprits, "times", times)
	}
}

// nameNonFinite adds to an error which gradients of this rank are not finite.
func (g *Gradients) nameNonFinite(ctx context.Context, cause error) error {
	culprits, err := g.nonFinite(ctx)
	if err != nil || len(culprits) == 0 {
		return cause
	}
	return fmt.Errorf("%w: gradients %d of rank %d", cause, culprits, g.meter.Rank())
}

// nonFinite returns which gradients of the step that is being completed are not finite on this rank.
func (g *Gradients) nonFinite(ctx context.Context) (culprits []int, err error) {
	t := g.transaction
	if t.cfg.NoUndo { // results are in their place
		return nil, nil
	}
	if err := g.side.catchUp(); err != nil {
		return nil, err
	}
	if err := t.sumSquares(g.step.tensors, 1); err != nil {
		return nil, err
	}
	if err := t.order.HostAfterCompute(ctx); err != nil {
		return nil, err
	}
	squares := make([]float64, len(g.gradients))
	if err := t.rt.CopyOut(hostmem.Bytes(squares), t.squares); err != nil {
		return nil, err
	}
	for i, square := range squares {
		if math.IsNaN(square) || math.IsInf(square, 0) {
			culprits = append(culprits, i)
		}
	}
	return culprits, nil
}

// noteSkip has the device note whether it skips a step, for lookForSkips.
func (t *transaction) noteSkip() error {
	t.note[0] = kernel.Copy{
		Dst:   t.noted,
		Src:   t.minimum,
		DType: dtype.F32,
		N:     1,
	}
	return t.kernels.CopyIf(t.note[:], t.skip, 1)
}

// takeNote returns whether the device has skipped a step since the last call.
func (t *transaction) takeNote(ctx context.Context) (skipped bool, err error) {
	if err := t.order.HostAfterAll(ctx); err != nil {
		return false, err
	}
	var noted [1]int32
	if err := t.rt.CopyOut(hostmem.Bytes(noted[:]), t.noted); err != nil {
		return false, err
	}
	return noted[0] != 0, t.rt.Fill(t.noted, 1, dtype.I32, 0)
}

// lookForSkips looks in each 256th step whether the device has skipped one, as the host waits for it in none.
func (g *Gradients) lookForSkips(ctx context.Context) error {
	if !g.undecided || g.steps%skipInterval != skipInterval-1 || g.rt.Stats().Frozen || base.IsQuiet(ctx) {
		return nil
	}
	return g.reportNote(ctx)
}

// reportNote logs that the device has skipped steps, if it has since the last call.
func (g *Gradients) reportNote(ctx context.Context) error {
	if err := g.side.catchUp(); err != nil {
		return err
	}
	skipped, err := g.transaction.takeNote(ctx)
	if err != nil || !skipped || g.meter.Rank() != 0 {
		return err
	}
	if times, due := g.skips.Count("by the device"); due {
		const text = "ddp: steps have been skipped on all ranks, as gradients were not finite"
		slog.Warn(text, "rank", 0, "step", g.steps, "times", times)
	}
	return nil
}

package engine

import (
	"context"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// judges reports whether steps check for entries that are not finite.
func (e *engine) judges() bool {
	return e.cfg.NonFinite != PassNonFinite && e.n > 0
}

// flagsInput reports whether a dense step tells the other ranks of a gradient whose sum with theirs may not stay
// finite. The dense pattern of a program checks sums alone. If Auto has chosen it, it checks sent entries, as all
// other patterns do.
func (e *engine) flagsInput() bool {
	return e.cfg.chosen && e.judges()
}

// flagInput makes the first element of this rank's addend a NaN if its norm is that large. The step is then rolled
// back on all ranks.
func (e *engine) flagInput(p uintptr, dt dtype.DType) {
	if !e.flagsInput() {
		return
	}
	e.do(func() error {
		return e.kernels.SumSquares(p, dt, e.n, e.address(numSquares))
	})
	square := kernel.Entries{
		Idx: e.address(numSquares),
		Val: e.address(numSquares + 1),
		N:   1,
	}
	e.do(func() error {
		return e.kernels.CountAbove(square, e.address(numNorm), 1, e.flags)
	})
	e.copies = append(e.copies[:0], kernel.Copy{
		Dst:   p,
		Src:   e.address(numNaN),
		DType: dt,
		N:     1,
	})
	e.do(func() error {
		return e.kernels.CopyIf(e.copies, e.flags, 1)
	})
}

// skipped records that the step was rolled back.
func (s *Reducer) skipped() {
	s.stats.Skipped = true
	s.stats.SelectedGlobal = 0
	s.result = result{}
}

// judge evaluates the counts. If the host has not waited for the device in this step, it leaves the decision to the
// device.
func (s *Reducer) judge(ctx context.Context) Verdict {
	switch {
	case s.err != nil || !s.judges():
		return Passes
	case s.cfg.NonFinite == SkipNonFinite && s.order.Streams != nil && !s.hostWaited:
		return Deferred
	case s.finding == finite || s.finding == unknown && !s.foundNonFinite(ctx):
		return Passes
	case s.cfg.NonFinite == FailNonFinite && s.stats.K > 0: // otherwise no other rank knows
		s.check(ErrNonFinite)
	}
	return Skips
}

// judgeAlone checks a gradient that is not sent for entries that are not finite. No other rank knows of them, so they
// do not count if several tensors have one verdict. An entry counts if a step that sends it would be skipped, and all
// later steps too, because the residual would keep it.
func (s *Reducer) judgeAlone() {
	if !s.judges() {
		return
	}
	flags := s.flags
	skip := s.skip
	skips := s.skips
	s.flags = s.address(s.nonFiniteCounts)
	s.skip = s.address(s.nonFiniteCounts)
	s.skips = s.size
	s.countList(kernel.Entries{Val: s.residual, N: s.n}, 0)
	if s.cfg.ClipNorm > 0 && s.cfg.ClipGlobal && s.size > 1 { // all ranks know this norm
		s.countSquares(1)
	}
	if flags != s.flags && s.origin != 0 {
		s.copies = append(s.copies[:0], kernel.Copy{
			Dst:   s.residual,
			Src:   s.origin,
			DType: dtype.F32,
			N:     s.held,
		})
		s.copyIfNonFinite()
	}
	s.flags = flags
	s.skip = skip
	s.skips = skips
}

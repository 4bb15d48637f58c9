package engine

import (
	"context"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// judges reports whether entries that are not finite are looked for.
func (e *engine) judges() bool {
	return e.cfg.NonFinite != PassNonFinite && e.n > 0
}

// flagsInput reports whether a dense step tells the other ranks of a gradient whose sum with theirs may not stay
// finite. The dense pattern judges sums alone. Where Auto has chosen it, it judges what ranks send, as all other
// patterns do.
func (e *engine) flagsInput() bool {
	return e.cfg.chosen && e.judges()
}

// flagInput makes a NaN of the first element of what this rank adds to a sum, if its norm is so large. The step is
// rolled back on all ranks then.
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

// skipped notes that the step was rolled back.
func (s *Reducer) skipped() {
	s.stats.Skipped = true
	s.stats.SelectedGlobal = 0
	s.result = result{}
}

// judge looks at what was counted. Where the host has not waited for
// the device in this step, it leaves the question to the device.
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

// judgeAlone looks for entries that are not finite in a gradient that is not sent, which no other
// rank knows of: they do not count where several tensors have one verdict. An entry is
// one if a step that sends it would be skipped for it, and so would all that follow, as
// the residual would keep it.
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

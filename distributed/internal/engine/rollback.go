package engine

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// save keeps what rollBack brings back: the numbers that a step leaves to later ones, and
// the residual. That stays where it is, as the origin,
// and the step writes the new one to the memory of the origin before, at no cost.
// A captured step is to find and leave it at the same address, so there the pass that
// adds the gradient keeps it in the origin. With momentum it is copied, and so it is in
// all steps from then on that are not captured.
func (e *engine) save() {
	// A graph needs addresses that stay, so its capture freezes the allocator.
	frozen := e.rt.Stats().Frozen
	e.captured = e.captured || frozen
	if e.cfg.NoUndo {
		return
	}
	e.copy(e.before.Ptr, e.address(numKept), keptWords(e.size))
	e.fill(e.flags, e.size)
	e.fixed = e.fixed || frozen
	restores := swapped
	if e.fixed && e.origin != 0 {
		restores = keeping
	}
	if e.err == nil {
		e.restores = restores
		e.swap()
		e.hostBefore = e.hostState
	}
	if !frozen || e.held != e.n {
		e.keep()
	}
}

// keep keeps the residual at once, if the pass that adds the gradient was to do it: where that may end midway, the
// origin would have a part.
func (e *engine) keep() {
	if e.restores == keeping {
		e.copy(e.origin, e.residual, e.held)
		if e.err == nil {
			e.restores = kept
		}
	}
}

// swap exchanges the residual and its origin, unless addresses are fixed.
func (e *engine) swap() {
	if e.origin != 0 && !e.fixed {
		e.residual, e.origin = e.origin, e.residual
	}
}

// rollBack makes the residual and the numbers that are kept what they were at save, bit for bit.
// It does so once, and again only if it fails.
func (e *engine) rollBack() {
	e.copy(e.address(numKept), e.before.Ptr, keptWords(e.size))
	if e.restores == kept { // then swap does nothing
		e.copy(e.residual, e.origin, e.held)
	}
	if e.err == nil {
		e.swap()
		e.hostState = e.hostBefore
		e.restores = nothingSaved
	}
}

// rollBackIfNonFinite has the device roll the step back, and make the gradient zero, if
// there were entries that are not finite. The host's state is that before the step then: whoever leaves one
// finds out ([numbers].dropped).
func (e *engine) rollBackIfNonFinite(g Input) {
	e.copies = e.copies[:0]
	if e.restores != nothingSaved {
		numbers := kernel.Copy{
			Dst:   e.address(numKept),
			Src:   e.before.Ptr,
			DType: dtype.F32,
			N:     keptWords(e.size),
		}
		e.copies = append(e.copies, numbers)
		if e.origin != 0 {
			e.copies = append(e.copies, kernel.Copy{
				Dst:   e.residual,
				Src:   e.origin,
				DType: dtype.F32,
				N:     e.held,
			})
		}
	}
	e.copies = append(e.copies, kernel.Copy{
		Dst:   g.Ptr,
		DType: g.DType,
		N:     e.n,
	})
	if e.hostState.pending { // numTiny is a word that is not 0
		e.copies = append(e.copies, kernel.Copy{
			Dst:   e.address(e.skippedLast),
			Src:   e.address(numTiny),
			DType: dtype.F32,
			N:     1,
		})
	}
	e.copyIfNonFinite()
}

// copyIfNonFinite makes the copies if there were such entries.
func (e *engine) copyIfNonFinite() {
	e.do(func() error {
		return e.kernels.CopyIf(e.copies, e.skip, e.skips)
	})
}

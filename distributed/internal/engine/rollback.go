package engine

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// save saves the state that rollBack restores: the numbers that a step leaves to later ones, and the residual. The
// residual stays in place, as the origin, and the step writes the new one to the memory of the previous origin, at no
// cost. A captured step must use the same addresses every time, so there the pass that adds the gradient copies the
// residual to the origin. With momentum it is copied, as in all later steps that are not captured.
func (e *engine) save() {
	// A graph needs fixed addresses, so its capture freezes the allocator.
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

// keep copies the residual at once, if the pass that adds the gradient was to do so: if that pass may end midway, the
// origin would be incomplete.
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

// rollBack restores the residual and the kept numbers from save, bit for bit. It does so once, and again only after a
// failure.
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

// rollBackIfNonFinite makes the device roll the step back, and clear the gradient, if there were entries that are not
// finite. The host's state is then the one before the step; code that leaves numbers for later learns this
// ([numbers].skippedLast).
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
	if e.hostState.pending { // numTiny is a nonzero word
		e.copies = append(e.copies, kernel.Copy{
			Dst:   e.address(e.skippedLast),
			Src:   e.address(numTiny),
			DType: dtype.F32,
			N:     1,
		})
	}
	e.copyIfNonFinite()
}

// copyIfNonFinite makes the copies if there were entries that are not finite.
func (e *engine) copyIfNonFinite() {
	e.do(func() error {
		return e.kernels.CopyIf(e.copies, e.skip, e.skips)
	})
}

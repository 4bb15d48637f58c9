package schedule

import (
	"context"
	"math/bits"

	"github.com/tutti-go/tutti/comm"
)

// Barrier waits until every rank has called it. op is the call that waits; first marks its first barrier: a Split has
// three, and one sequence number.
//
// It is a dissemination barrier (Hensgen, Finkel and Manber, 1988) done twice. After the first half all ranks have
// arrived, and no rank leaves the second half before all know that. So no rank leaves the barrier if one aborted
// before all had arrived. Once one rank has left, all leave, even if that rank aborts next (see aborted), unless a
// rank aborts that is still in the barrier.
func (e *Engine) Barrier(ctx context.Context, op comm.Op, first bool) error {
	if err := e.wait(ctx, op); err != nil {
		return err
	}
	number, err := e.startBarrier(op, first)
	if err != nil {
		return err
	}
	err = e.wait(ctx, op)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.passed > number {
		return nil // regardless of later messages
	}
	return err
}

// startBarrier submits a barrier, and returns its number in the call log.
func (e *Engine) startBarrier(op comm.Op, first bool) (number uint64, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.Life.Err(); err != nil {
		return 0, err
	}
	number = e.log.calls
	e.plan(&comm.Call{Op: op}, first)
	return number, e.launch()
}

// barrier plans a barrier.
func (p planner) barrier() {
	o := p.op(stepBarrier)
	if p.segment.fits(0) {
		o.Step = stepSharedBarrier
		o.round.active = true
	}
	p.add(o)
}

// stepBarrier tells the rank 1, 2, 4, … places ahead that all ranks up to this one have arrived, and waits for the
// same message from the rank as far behind.
func stepBarrier(e *Engine, o *Op) bool {
	rounds := bits.Len(uint(e.size - 1))
	if o.phase == tagPhases*rounds {
		return true
	}
	tag := o.tag + uint64(o.phase/rounds)
	distance := 1 << (o.phase % rounds)
	e.recvBytes(o, tag, 0, 0, (e.rank+e.size-distance)%e.size)
	e.sendBytes(o, tag, 0, 0, (e.rank+distance)%e.size)
	return false
}

package mpi

import (
	"context"
	"math/bits"

	"github.com/tutti-go/tutti/comm"
)

// barrier waits until every rank has called it. op is the call that waits, and first says
// that this is its first barrier: a Split has three, and one sequence number.
//
// It is a dissemination barrier (Hensgen, Finkel and Manber, 1988) done twice. After the first
// all ranks have come, and no rank leaves the second before all know. So no rank leaves the
// barrier if one aborted before all had come. If one has left it, all leave it, also if that
// one aborts next (see aborted), unless a rank aborts that is still in it. With interop it is
// MPI's.
func (e *endpoint) barrier(ctx context.Context, op comm.Op, first bool) error {
	if err := e.wait(ctx, op); err != nil {
		return err
	}
	e.mu.Lock()
	err, number := e.life.Err(), e.log.calls
	if err == nil {
		p := planner{endpoint: e, c: &comm.Call{Op: op}, entry: entry{op: op}}
		if first {
			e.log.sequence++
		}
		e.log.add(p.entry, nil)
		p.barrier()
		err = e.launch()
	}
	e.mu.Unlock()
	if err != nil {
		return err
	}
	err = e.wait(ctx, op)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.passed > number {
		return nil // whatever has come after that
	}
	return err
}

// barrier plans a barrier.
func (p planner) barrier() {
	step, shared := stepBarrier, p.segment.fits(0)
	switch {
	case p.interop():
		step = stepNativeBarrier
	case shared:
		step = stepSharedBarrier
	}
	o := p.op(step)
	o.shared = shared
	p.add(o)
}

// stepBarrier tells the rank 1, 2, 4, … places ahead that all ranks up to this one have come,
// and waits for the same message from the rank as far behind.
func stepBarrier(e *endpoint, o *op) (bool, error) {
	rounds := bits.Len(uint(e.size - 1))
	if o.phase == tagPhases*rounds {
		return true, nil
	}
	tag, distance := o.msgTag+uintptr(o.phase/rounds), 1<<(o.phase%rounds)
	if err := e.recvBytes(o, tag, 0, 0, (e.rank+e.size-distance)%e.size); err != nil {
		return false, err
	}
	return false, e.sendBytes(o, tag, 0, 0, (e.rank+distance)%e.size)
}

func stepNativeBarrier(e *endpoint, o *op) (bool, error) {
	if o.phase == 1 {
		return true, nil
	}
	slot, err := e.table.add(e.lib, o, everybody, sent)
	if err == nil {
		e.table.calls.Add(e.lib.Ibarrier, e.pub, slot)
	}
	return false, err
}

package mpi

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// barrier waits until every rank has called it, with two of MPI's
// (MPI_Ibarrier), the second of which starts when the first is done. So no rank
// leaves the barrier if another gave up before all had come: what that one sent
// so far would end a single MPI barrier on the others. With native collectives
// it is one. op is the call that waits.
func (e *endpoint) barrier(ctx context.Context, op comm.Op) error {
	if err := e.sync(ctx, op.String()); err != nil {
		return err
	}
	e.mu.Lock()
	err := e.usable()
	if err == nil {
		p := planner{e, &comm.Call{Op: op}, 0}
		p.add(p.op(stepBarrier))
		err = e.launch()
	}
	e.mu.Unlock()
	if err != nil {
		return e.check.Fail(op.String(), err)
	}
	return e.wait(ctx, op.String())
}

func stepBarrier(e *endpoint, o *op) (bool, error) {
	if o.phase == 2 || o.phase == 1 && e.native {
		return true, nil
	}
	slot := e.table.add(o, sent)
	return false, e.table.posted(e.lib, e.lib.Ibarrier, e.lib.call(e.lib.Ibarrier, e.pub, slot))
}

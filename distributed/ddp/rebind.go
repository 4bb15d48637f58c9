package ddp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/base"
)

// Rebind moves g to another communicator, as [sparse.Reducer.Rebind] does. All ranks of c call it together, because it
// allocates symmetric memory if c has it. A step that has begun is rolled back, as by a failed Wait. If nothing in it
// has failed, close or abort its communicator first, because peers may not be in that step; otherwise Rebind returns
// [comm.ErrArgument] and changes nothing. If a step that is not a transaction has failed, gradients and residuals stay
// as they are, and g can be used again only if all buckets are plain allreduces. If the wait for work in flight on the
// old communicator fails, g stays with that communicator, in the step.
func (g *Gradients) Rebind(ctx context.Context, c comm.Communicator) error {
	const op = "gradient rebind"
	if err := base.Reaches(g.rt, c); err != nil {
		return base.OpError(op, err)
	}
	if err := g.usable(op); g.closed || g.err != nil && !g.transaction.plain {
		return err
	}
	if g.step.begun && g.sound() && g.meter.Err() == nil {
		return base.OpError(op, fmt.Errorf("%w: in the middle of a step: call Wait, or close its communicator "+
			"(comm.CloseAll)", comm.ErrArgument))
	}
	if g.async != nil {
		_ = g.async.wait(ctx, g.lines.all) // what it leaves in flight, awaitStep waits for
	}
	limited, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	if err := g.awaitStep(limited); err != nil {
		return base.OpError(op, err)
	}
	if g.transaction.plain {
		g.err = nil // a plain allreduce keeps nothing that its error could spoil
		g.unfold()
		g.newStep()
	} else if g.step.begun && g.transaction.rollsBack() {
		g.step.fault = cmp.Or(g.step.fault, g.meter.Err()) // why a sound step ends
		_ = g.rollBack()
	}
	if err := g.between(op); err != nil {
		return err
	}
	g.err = g.rebind(ctx, c)
	return base.OpError(op, g.err)
}

func (g *Gradients) rebind(ctx context.Context, c comm.Communicator) error {
	if g.transaction.plain { // they live in memory of the communicator
		g.views = nil
	}
	_, symmetric := comm.As[comm.SymmetricAllocator](g.meter)
	for _, b := range g.buckets {
		b.joined = nil
		b.separate = nil
		b.flat = nil
		if b.memory == nil {
			continue
		}
		if !symmetric { // otherwise the communicator's Close does it, as its peers may be gone
			if err := b.memory.Free(ctx); err != nil && !errors.Is(err, comm.ErrClosed) {
				return err
			}
		}
		b.memory = nil
	}
	if err := g.freeHeld(); err != nil {
		return err
	}
	had := g.meter.WorldSize()
	g.meter = metered.New(c)
	g.agreed = false
	g.order = base.NewOrder(g.rt, g.meter)
	if ops, ok := comm.As[comm.StreamSyncOps](g.meter); ok && g.side != nil {
		g.side.ops = ops
	}
	l, err := g.newLines(ctx)
	if err != nil {
		return errors.Join(err, l.close())
	}
	before := g.lines
	g.lines = l
	for _, b := range g.buckets {
		if m, ok := b.reducer.(*meshed); ok {
			err = m.rebind(&g.lines, g.meter)
		} else {
			err = b.reducer.Rebind(g.meter)
		}
		if err != nil {
			return errors.Join(err, before.close())
		}
	}
	if err := before.close(); err != nil {
		return err
	}
	if deferred := g.deferred(); len(deferred) > 0 && g.confirm == nil {
		base.ReportLost(&g.skips, had, c, "gradients", deferred)
	}
	if g.undecided { // the buckets have found out
		skipped, err := g.buckets[0].reducer.Skipped(ctx)
		if err != nil {
			return err
		}
		g.stats.Skipped = skipped
		g.undecided = false
	}
	if err := g.transaction.bind(g); err != nil {
		return err
	}
	if err := g.newRoster(); err != nil {
		return err
	}
	g.newStep()
	return g.allocate(ctx)
}

// deferred returns the gradients of which ranks keep residuals.
func (g *Gradients) deferred() (list []int) {
	for _, b := range g.buckets {
		if b.cfg.Defers() {
			list = append(list, b.params...)
		}
	}
	slices.Sort(list)
	return list
}

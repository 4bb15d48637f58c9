package local

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/fixedpoint"
)

// Submit implements [backend.Backend].
func (e *endpoint) Submit(c comm.Call) error { return e.submit(&c, nil, nil) }

// submit takes one operation. split is its part of a Split, and sums are those of an allreduce in fixed point.
func (e *endpoint) submit(c *comm.Call, split *splitCall, sums []fixedpoint.Sum) error {
	e.mu.Lock()
	if err := e.refusal(); err != nil {
		e.mu.Unlock()
		return err
	}
	e.submitted.Store(e.submitted.Load() + 1)
	run := driver{endpoint: e}
	x := newEntry(c)
	switch {
	case c.Op.Message() || e.pending.Load() > 0 || !e.hasRoom(&x):
		e.batch = append(e.batch, e.newOp(c, split, sums))
		e.enqueueBatch()
		e.mu.Unlock()
		run.kick(e)
	case e.world.isSmall(&x):
		e.tell(&x)
		e.mu.Unlock()
		run.told()
	default:
		seq, s := e.enter(&x)
		if c.RecvCounts != nil || split != nil || sums != nil {
			s.extras[e.rank].set(c, split, sums)
		}
		e.arrivals.Store(seq + 1)
		e.mu.Unlock()
		run.arrive(seq)
	}
	run.run()
	return nil
}

// refusal returns why no call is accepted any more, nil if one is. Once the world has failed, nothing is
// told or put into the ring: what failedWith finds then is what all ranks find. The caller holds e.mu.
func (e *endpoint) refusal() error {
	if f := e.world.failure.Load(); f != nil {
		e.life.Fail(f.errorFor(e)) // who broke the world may not have come to this rank
	}
	return e.life.Err()
}

// SubmitTogether implements [backend.Backend].
func (e *endpoint) SubmitTogether(calls []comm.Call) error {
	e.mu.Lock()
	if err := e.refusal(); err != nil {
		e.mu.Unlock()
		return err
	}
	e.submitted.Store(e.submitted.Load() + uint64(len(calls)))
	for i := range calls {
		e.batch = append(e.batch, e.newOp(&calls[i], nil, nil))
	}
	e.enqueueBatch()
	e.mu.Unlock()
	run := driver{endpoint: e}
	run.kick(e)
	run.run()
	return nil
}

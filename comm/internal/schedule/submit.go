package schedule

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// Submit implements [backend.Backend].
func (e *Engine) Submit(c comm.Call) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.accepts(&c); err != nil {
		return err
	}
	e.plan(&c, 0)
	return e.launch()
}

// SubmitTogether implements [backend.Backend].
func (e *Engine) SubmitTogether(calls []comm.Call) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range calls {
		if err := e.accepts(&calls[i]); err != nil {
			return err
		}
	}
	e.groups++
	// Messages go first: a collective may wait for another one of the group, and that one for
	// a rank that waits for one of these messages.
	for _, messages := range [...]bool{true, false} {
		for i := range calls {
			if calls[i].Op.Message() == messages {
				e.plan(&calls[i], e.groups)
			}
		}
	}
	return e.launch()
}

// Wait does a Sync or a Barrier.
func (e *Engine) Wait(ctx context.Context, op comm.Op) error {
	if op == comm.OpBarrier {
		return e.Barrier(ctx, op, true)
	}
	return e.wait(ctx, op)
}

// accepts returns why a call cannot be submitted, if so. The caller holds mu.
func (e *Engine) accepts(c *comm.Call) error {
	if err := e.Life.Err(); err != nil || e.offload == nil {
		return err
	}
	return e.offload.Accepts(*c)
}

// plan makes the operations of a call and queues them. Those of one group other than 0 do not
// wait for each other. The caller holds mu and calls launch afterwards.
func (e *Engine) plan(c *comm.Call, group uint64) {
	p := planner{e, c, newEntry(c), group}
	if !c.Op.Message() {
		e.log.sequence++
		e.log.add(p.entry, c.RecvCounts)
	}
	p.plan()
}

// plan leaves the call to the backend, or schedules it.
func (p planner) plan() {
	if p.offload == nil {
		p.schedule()
	} else if o := p.op(nil); p.offload.Plan(o, *p.c) {
		p.add(o)
	} else {
		o.plan = plan{}
		p.free = append(p.free, o)
		p.schedule()
	}
}

// schedule plans a call as this package does it.
func (p planner) schedule() {
	switch op := p.c.Op; {
	case op.Message():
		p.message(p.op(stepMessage))
	case !op.MovesData():
		p.barrier()
	case op == comm.OpAllReduce:
		p.reduce(everybody)
	case op == comm.OpReduce:
		p.reduce(p.c.Peer)
	case op == comm.OpReduceScatter:
		p.reduceScatter()
	case p.sharedExchange():
	case op == comm.OpBroadcast:
		p.broadcast()
	default:
		p.exchange()
	}
}

// launch starts the planned operations that can start. The caller holds mu.
func (e *Engine) launch() error {
	if e.notify != nil {
		e.notify()
	}
	return e.start()
}

// planner makes the operations of one call.
type planner struct {
	*Engine
	c     *comm.Call
	entry entry
	group uint64
}

// op returns an operation to fill in and add.
func (p planner) op(step Step) *Op {
	o := p.newOp()
	o.entry, o.Step = p.entry, step
	o.send, o.recv = p.c.Send, p.c.Recv
	return o
}

// add queues an operation.
func (p planner) add(o *Op) {
	o.group = p.group
	p.enqueue(o)
}

// SetUp makes a collective that does not enter the call log, as a backend does to set a
// communicator up, and waits for it. All ranks call it at the same place.
func (e *Engine) SetUp(ctx context.Context, c comm.Call) error {
	e.mu.Lock()
	planner{e, &c, newEntry(&c), 0}.schedule()
	err := e.launch()
	e.mu.Unlock()
	if err != nil {
		return err
	}
	return e.wait(ctx, comm.OpSplit)
}

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
	e.groups++
	e.plan(&c, true)
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
	// Messages go first: a collective may wait for another one of the group, and that one for a rank that waits for
	// one of these messages.
	for _, messages := range [...]bool{true, false} {
		for i := range calls {
			if calls[i].Op.Message() == messages {
				e.plan(&calls[i], true)
			}
		}
	}
	return e.launch()
}

// accepts returns the reason why a call is refused, or nil. The caller holds mu.
func (e *Engine) accepts(c *comm.Call) error {
	if err := e.Life.Err(); err != nil || e.offload == nil {
		return err
	}
	return e.offload.Accepts(*c)
}

// Wait does a Sync or a Barrier.
func (e *Engine) Wait(ctx context.Context, op comm.Op) error {
	if op == comm.OpBarrier {
		return e.Barrier(ctx, op, true)
	}
	return e.wait(ctx, op)
}

// plan makes the operations of a call and queues them, either by the backend or by schedule. The caller holds mu and
// calls launch afterwards. counts is false for parts of a user's call.
func (e *Engine) plan(c *comm.Call, counts bool) {
	p := planner{e, c, newEntry(c)}
	if !c.Op.Message() {
		if counts {
			e.log.sequence.Add(1)
		}
		e.log.add(p.entry, c.RecvCounts)
	}
	if !p.offloaded() {
		p.schedule()
	}
}

// offloaded plans a call that the backend runs, and returns false if it does not.
func (p planner) offloaded() bool {
	if p.offload == nil {
		return false
	}
	o := p.op(nil)
	if !p.offload.Plan(o, *p.c) {
		o.plan = plan{}
		p.free = append(p.free, o)
		return false
	}
	for r := 0; r < p.size && p.c.Op.MovesData(); r++ {
		p.sendPart(o, r)
		p.recvPart(o, r)
	}
	p.add(o)
	return true
}

// schedule plans a call by the schedules of this package.
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
	c     *comm.Call // the call that is planned
	entry entry      // describes the call in errors
}

// op returns an empty operation.
func (p planner) op(step Step) *Op {
	var o *Op
	if last := len(p.free) - 1; last >= 0 {
		o = p.free[last]
		p.free = p.free[:last]
	} else {
		o = newOp(p.size)
	}
	o.entry = p.entry
	o.Step = step
	o.send = p.c.Send
	o.recv = p.c.Recv
	return o
}

// sendPart returns the data that the call sends to a rank, which o reads.
func (p planner) sendPart(o *Op, to int) (address uintptr, bytes int, ok bool) {
	if address, bytes, ok = p.c.SendPart(p.rank, to); ok {
		o.reads = o.reads.with(spanOf(address, bytes))
	}
	return address, bytes, ok
}

// recvPart returns the memory for the data of a rank, which o writes.
func (p planner) recvPart(o *Op, from int) (address uintptr, bytes int, ok bool) {
	if address, bytes, ok = p.c.RecvPart(p.rank, from); ok {
		o.writes = o.writes.with(spanOf(address, bytes))
	}
	return address, bytes, ok
}

// add appends an operation to those submitted before.
func (p planner) add(o *Op) {
	o.group = p.groups
	if o.collective() {
		o.number = p.log.calls - 1
		o.sequence = p.log.sequence.Load()
		o.seq = p.seq
		o.tag = p.tag(p.seq)
		o.round.fingerprint = p.log.fingerprint
		p.seq++
	} else {
		o.number = p.messages.Begin()
	}
	p.queued.push(o)
	p.inFlight.Add(1)
}

// SetUp makes a collective by the schedules of this package, for a backend that sets a communicator up, and waits for
// it. It belongs to a Split, or to the making of a world. All ranks must call it at the same place.
func (e *Engine) SetUp(ctx context.Context, c comm.Call) error {
	if err := e.startSetUp(&c); err != nil {
		return err
	}
	return e.wait(ctx, comm.OpSplit)
}

// startSetUp submits a collective of SetUp. It enters the call log, by which others know whether a rank that has closed
// its communicator took part.
func (e *Engine) startSetUp(c *comm.Call) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.Life.Err(); err != nil {
		return err
	}
	p := planner{e, c, newEntry(c)}
	e.log.add(p.entry, c.RecvCounts)
	p.schedule()
	return e.launch()
}

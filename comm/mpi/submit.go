package mpi

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// Submit implements [backend.Backend].
func (e *endpoint) Submit(c comm.Call) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.accepts(&c); err != nil {
		return err
	}
	e.plan(&c, 0)
	return e.launch()
}

// SubmitTogether implements [backend.Backend].
func (e *endpoint) SubmitTogether(calls []comm.Call) error {
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

// Wait implements [backend.Backend].
func (e *endpoint) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	switch w.Op {
	case comm.OpSync:
		return nil, e.wait(ctx, w.Op)
	case comm.OpBarrier:
		return nil, e.barrier(ctx, w.Op, true)
	}
	child, err := e.makeSub(ctx, w.Color, w.Key)
	if child == nil {
		return nil, err
	}
	return newCommunicator(child), nil
}

// accepts returns why a call cannot be submitted, if so. The caller holds mu.
func (e *endpoint) accepts(c *comm.Call) error {
	if err := e.life.Err(); err != nil || !e.native() {
		return err
	}
	return e.nativeAccepts(c)
}

// plan makes the operations of a call and queues them. Those of one group other than 0 do not
// wait for each other. The caller holds mu and calls launch afterwards.
func (e *endpoint) plan(c *comm.Call, group uint64) {
	p := planner{e, c, newEntry(c), group}
	if c.Op.Message() {
		p.message()
		return
	}
	e.log.sequence++
	e.log.add(p.entry, c.RecvCounts)
	switch {
	case e.native():
		p.native()
	case c.Op == comm.OpAllReduce:
		p.reduce(everybody)
	case c.Op == comm.OpReduce:
		p.reduce(c.Peer)
	case c.Op == comm.OpReduceScatter:
		p.reduceScatter()
	case p.sharedExchange():
	case c.Op == comm.OpBroadcast:
		p.broadcast()
	default:
		p.exchange()
	}
}

// launch starts the planned operations that can start. The caller holds mu.
func (e *endpoint) launch() error {
	e.state.progress.notify()
	return e.start()
}

// planner makes the operations of one call.
type planner struct {
	*endpoint
	c     *comm.Call
	entry entry
	group uint64
}

// op returns an operation to fill in and add.
func (p planner) op(step step) *op {
	o := p.newOp()
	o.entry, o.step = p.entry, step
	o.send, o.recv = p.c.Send, p.c.Recv
	return o
}

// add queues an operation.
func (p planner) add(o *op) {
	o.group = p.group
	p.enqueue(o)
}

package p2p

import (
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// do makes a call, here or on the base.
func (c *Comm) do(x comm.Call) error {
	c.progress.enter()
	err := c.make(x)
	c.leave(err, x.Op)
	return err
}

// make is do, but for what Sync and Progress need.
func (c *Comm) make(x comm.Call) error {
	if !c.offload.has(&x) {
		if err := c.sound(); err != nil {
			return c.check.Fail(x.Op.String(), err)
		}
		return x.Make(c.Communicator)
	}
	if err := c.check.Call(&x); err != nil {
		return err
	}
	if err := c.submit(&x); err != nil {
		return c.check.Fail(x.Op.String(), err)
	}
	return nil
}

// together starts a group on the base, but for what that cannot do.
func (c *Comm) together(calls []comm.Call) error {
	c.progress.enter()
	err := c.group(calls)
	ops := make([]comm.Op, len(calls))
	for i := range calls {
		ops[i] = calls[i].Op
	}
	c.leave(err, ops...)
	return err
}

// group is together, but for what Progress needs.
func (c *Comm) group(calls []comm.Call) error {
	err := c.sound()
	if err == nil {
		err = c.check.Group(calls)
	}
	if err != nil {
		return c.check.Fail("group", err)
	}
	var rest, own []comm.Call
	for _, x := range calls {
		if c.offload.lacked(&x) {
			own = append(own, x)
		} else {
			rest = append(rest, x)
		}
	}
	if len(own) == 0 {
		return c.Communicator.Group(calls...)
	}
	if err := c.Communicator.Group(rest...); err != nil {
		return err
	}
	for i := range own {
		if err := c.submit(&own[i]); err != nil {
			return c.check.Fail("group", err)
		}
	}
	return nil
}

// submit launches a call's kernel in the base's stream, behind what the base
// submitted there.
func (c *Comm) submit(x *comm.Call) error {
	if err := c.usable(); err != nil || x.Count == 0 {
		return err
	}
	return c.launch(c.here.plan(x))
}

func (c *Comm) launch(p plan) error {
	err := c.here.submit(c.current(), p)
	if err == nil || errors.Is(err, comm.ErrClosed) {
		return err
	}
	var refused *cuda.Error
	if errors.As(err, &refused) && refused.InCapture() {
		return err
	}
	return c.breakDown(err)
}

// plan plans a call.
func (p *planner) plan(x *comm.Call) plan {
	switch x.Op {
	case comm.OpAllReduce:
		return p.allReduce(x.Send, x.Recv, x.Count, x.DType, x.Reduce)
	case comm.OpReduce:
		return p.reduceTo(x.Send, x.Recv, x.Count, x.DType, x.Reduce, x.Peer)
	case comm.OpReduceScatter:
		return p.reduceScatter(x.Send, x.Recv, x.Count, x.DType, x.Reduce)
	case comm.OpAllGather:
		return p.allGather(x.Send, x.Recv, x.Bytes())
	case comm.OpAllToAll:
		return p.allToAll(x.Send, x.Recv, x.Bytes())
	case comm.OpBroadcast:
		return p.broadcast(x.Recv, x.Bytes(), x.Peer)
	}
	return p.barrier()
}

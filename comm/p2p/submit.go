package p2p

import (
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// adapter is the [backend.Backend] of a communicator.
type adapter struct{ c *Comm }

// Submit implements [backend.Backend].
func (a adapter) Submit(x comm.Call) error {
	c := a.c
	c.entered.Add(1)
	err := c.life.Err()
	switch {
	case err != nil:
	case c.offload.has(&x):
		err = c.submit(&x)
	default:
		err = x.Make(c.Communicator)
	}
	if err == nil {
		c.ledger.Begin(&x)
	}
	c.leave(1)
	return err
}

// SubmitTogether implements [backend.Backend]. The base gets the group, except for calls that
// it lacks.
func (a adapter) SubmitTogether(calls []comm.Call) error {
	c := a.c
	c.entered.Add(1)
	err := c.life.Err()
	if err == nil {
		err = c.group(calls)
	}
	if err == nil {
		for i := range calls {
			c.ledger.Begin(&calls[i])
		}
	}
	c.leave(len(calls))
	return err
}

func (c *Comm) group(calls []comm.Call) error {
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
	err := c.Communicator.Group(rest...)
	for i := range own {
		if err == nil {
			err = c.submit(&own[i])
		}
	}
	return err
}

// submit launches a call's kernel in the base's stream, behind what the base
// submitted there.
func (c *Comm) submit(x *comm.Call) error {
	if x.Count == 0 {
		return nil
	}
	return c.launch(c.end.plan(x))
}

func (c *Comm) launch(p plan) error {
	c.rt.Serialize(c)
	err := c.rt.BetweenLaunches(func() error { return c.end.submit(c.Stream(), p) })
	if err == nil {
		return nil
	}
	var refused *cuda.Error
	if errors.As(err, &refused) && refused.InCapture() { // the caller's mistake, the ranks are in step
		return fmt.Errorf("%w: %w", comm.ErrArgument, err)
	}
	return err
}

// AllReduceRounded implements [backend.Rounder], for [kernel.CodecI8] and [kernel.CodecFP8].
func (c *Comm) AllReduceRounded(src kernel.Source, sums uintptr, codec kernel.Codec, op comm.ReduceOp) error {
	x := comm.AllReduceCall(src.X, sums, src.N, dtype.F32, op)
	if err := c.check.Call(&x); err != nil {
		return err
	}
	p, ok := c.end.rounded(src, sums, codec, op)
	if !ok {
		return fmt.Errorf("p2p: %w: values rounded to %v between %d ranks", comm.ErrUnsupported, codec, c.WorldSize())
	}
	c.entered.Add(1)
	err := c.life.Err()
	if err == nil && src.N > 0 {
		err = c.launch(p)
	}
	if err == nil {
		c.ledger.Begin(&x)
	}
	c.leave(1)
	if err != nil {
		return c.life.Explain("allreduce rounded", err)
	}
	return nil
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

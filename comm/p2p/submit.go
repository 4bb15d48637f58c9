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
type adapter struct {
	c *Comm // whose backend it is
}

// Submit implements [backend.Backend].
func (a adapter) Submit(x comm.Call) error {
	c := a.c
	c.entered.Add(1)
	defer c.leave()
	if err := c.life.Err(); err != nil {
		return err
	}
	var err error
	if c.offload.has(&x) {
		err = c.submit(&x)
	} else {
		err = x.Make(c.Communicator)
	}
	if err != nil {
		return err
	}
	c.ledger.Begin(&x)
	return nil
}

// SubmitTogether implements [backend.Backend]. The base gets the group, except calls that it lacks.
func (a adapter) SubmitTogether(calls []comm.Call) error {
	c := a.c
	c.entered.Add(1)
	defer c.leave()
	if err := c.life.Err(); err != nil {
		return err
	}
	if err := c.group(calls); err != nil {
		return err
	}
	for i := range calls {
		c.ledger.Begin(&calls[i])
	}
	return nil
}

func (c *Comm) group(calls []comm.Call) error {
	var passed, lacked []comm.Call
	for _, x := range calls {
		if c.offload.lacked(&x) {
			lacked = append(lacked, x)
		} else {
			passed = append(passed, x)
		}
	}
	if len(lacked) == 0 {
		return c.Communicator.Group(calls...)
	}
	if err := c.Communicator.Group(passed...); err != nil {
		return err
	}
	for i := range lacked {
		if err := c.submit(&lacked[i]); err != nil {
			return err
		}
	}
	return nil
}

// submit launches a call's kernel in the base's stream, after the base's submissions.
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
	if errors.As(err, &refused) && refused.InCapture() { // the caller's mistake; the ranks are in step
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
	if err := c.submitRounded(&x, p); err != nil {
		return c.life.Explain("allreduce rounded", err)
	}
	return nil
}

// submitRounded launches the kernel of a call that sums rounded values.
func (c *Comm) submitRounded(x *comm.Call, p plan) error {
	c.entered.Add(1)
	defer c.leave()
	if err := c.life.Err(); err != nil {
		return err
	}
	if x.Count > 0 {
		if err := c.launch(p); err != nil {
			return err
		}
	}
	c.ledger.Begin(x)
	return nil
}

package ddp

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// announce takes part in counting the ranks that have data, with 1 or 0. Who has, does
// not look at the number.
func (g *Gradients) announce(ctx context.Context, have float64) error {
	if !g.cfg.Uneven {
		return nil
	}
	p, err := g.active.Ptr()
	if err == nil {
		err = g.rt.Fill(p, 1, dtype.F32, have)
	}
	if err == nil {
		err = g.order.CommAfterCompute(ctx)
	}
	if err != nil {
		return err
	}
	return g.meter.AllReduce(p, p+uintptr(dtype.F32.Size()), 1, dtype.F32, comm.Sum)
}

// Join is what a rank calls that has no data left, while others may have, in place
// of the steps that they make: it takes part in these with gradients of zero, until
// all ranks have called Join, and calls update, unless it is nil, after each. All ranks
// call it at the end of an epoch, and can begin the next one when it has returned. It
// needs [Config].Uneven; it is Join of PyTorch's DistributedDataParallel.
//
// gradients are the tensors in which update looks for averages, as Ready takes them: Join fills them
// with zeros, and averages are there when it calls update, as after Wait. So all ranks make the same
// update and keep the same parameters. With [Config].Shard averages are in the [Gradients.Shards], as in other steps.
// With [Config].BucketViews gradients may be nil, which is the views;
// otherwise that is [comm.ErrArgument] where there is an update. The host waits in each step.
//
// Averages stay those over all ranks, those without data included, as PyTorch's are
// by default: so a sample counts as much in the last steps as in others, and a
// sparse exchange keeps what it has not sent.
//
// The error of update ends Join; the other ranks wait for this one then, as after
// any error of a rank.
func (g *Gradients) Join(ctx context.Context, gradients []*runtime.Tensor, update func() error) error {
	const op = "gradient join"
	if err := g.usable(op); err != nil {
		return err
	}
	if !g.cfg.Uneven {
		return base.OpError(op, fmt.Errorf("%w: Config.Uneven is not set", comm.ErrArgument))
	}
	if g.step.begun {
		return base.OpError(op, fmt.Errorf("%w: in the middle of a step", comm.ErrArgument))
	}
	if gradients == nil {
		gradients = g.views
	}
	switch {
	case gradients == nil && update != nil:
		return base.OpError(op, fmt.Errorf("%w: no gradients in which update finds averages", comm.ErrArgument))
	case gradients != nil && len(gradients) != len(g.step.given):
		return base.OpError(op, fmt.Errorf("%w: %d gradients, registered were %d", comm.ErrArgument, len(gradients), len(g.step.given)))
	}
	for i, t := range gradients {
		if t == nil {
			return g.check(op, i, t)
		}
	}
	if err := g.checkAll(op, gradients); err != nil {
		return err
	}
	g.joining = gradients
	defer func() { g.joining = nil }()
	for {
		others, err := g.others(ctx)
		if g.fail(err); g.step.fault != nil {
			return base.OpError(op, g.rollBack())
		}
		if err != nil {
			return base.OpError(op, err)
		}
		if others == 0 {
			g.newStep()
			return nil
		}
		if err := g.Wait(ctx); err != nil {
			return err
		}
		if update == nil {
			continue
		}
		if err := update(); err != nil {
			return base.OpError(op, err)
		}
	}
}

// others begins a step without data, and returns how many ranks have some.
func (g *Gradients) others(ctx context.Context) (int, error) {
	p, err := g.active.Ptr()
	if err != nil {
		return 0, err
	}
	g.step.begun = true
	if err := g.drain(ctx); err != nil {
		return 0, err
	}
	if err := g.announce(ctx, 0); err != nil {
		return 0, err
	}
	if err := g.order.ComputeAfterComm(ctx); err != nil {
		return 0, err
	}
	if err := g.order.HostAfterAll(ctx); err != nil {
		return 0, err
	}
	var count [1]float32
	if err := g.rt.CopyOut(hostmem.Bytes(count[:]), p+uintptr(dtype.F32.Size())); err != nil {
		return 0, err
	}
	return int(count[0]), nil
}

// zero returns a tensor of zeros in the place of gradient i: in Join that of the caller.
func (g *Gradients) zero(i int) (*runtime.Tensor, error) {
	g.step.absent[i] = true
	if g.joining != nil {
		return g.joining[i], g.joining[i].Fill(0)
	}
	if g.gradients[i].spare == nil {
		t, err := runtime.New(g.rt, g.buckets[g.where[i]].dt, g.gradients[i].n)
		if err != nil {
			return nil, err
		}
		g.gradients[i].spare = t
	}
	return g.gradients[i].spare, g.gradients[i].spare.Fill(0)
}

package ddp

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/runtime"
)

// Join takes part in the steps of other ranks, with zero gradients, after this rank has run out of data. It returns
// when all ranks have called Join. It calls update, unless that is nil, after each step. All ranks call Join at the end
// of an epoch, and can begin the next one when it has returned. It needs [Config].Uneven, and corresponds to Join of
// PyTorch's DistributedDataParallel.
//
// update reads averages from gradients, tensors as Ready takes them. Join fills them with zeros, and they hold the
// averages when it calls update, as after Wait. So all ranks make the same update and keep the same parameters. With
// [Config].Shard averages are in the [Gradients.Shards], as in other steps. With [Config].BucketViews, nil gradients
// mean the views; otherwise they are [comm.ErrArgument] if there is an update. The host waits in each step.
//
// With [Config].Weighted, a rank that has called Join has weight 0, except for what it has accumulated. Otherwise
// averages are over all ranks, including those without data, as in PyTorch by default. So a sample counts as much in
// the last steps as in others, and a sparse exchange keeps its residual.
//
// An error of update ends Join. The other ranks then wait for this one, as after any error of a rank.
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
	case gradients != nil && len(gradients) != len(g.step.tensors):
		return base.OpError(op, fmt.Errorf("%w: %d gradients, registered were %d",
			comm.ErrArgument, len(gradients), len(g.step.tensors)))
	}
	for i, t := range gradients {
		if t == nil {
			return g.check(op, i, t)
		}
	}
	if err := g.checkAll(op, gradients); err != nil {
		return err
	}
	if g.weights.phase == weighed { // and there was no pass
		g.weights.phase = unweighed
		g.weights.pass = 0
	}
	g.joining = gradients
	defer func() { g.joining = nil }()
	for {
		count, err := g.joinStep(ctx)
		g.fail(err)
		if g.step.fault != nil {
			return base.OpError(op, g.rollBack())
		}
		if err != nil {
			return base.OpError(op, err)
		}
		if count == 0 {
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

// joinStep begins a step without data, and returns how many ranks have some.
func (g *Gradients) joinStep(ctx context.Context) (count int, err error) {
	g.step.begun = true
	if err := g.drain(ctx); err != nil {
		return 0, err
	}
	if err := g.announce(ctx, 0); err != nil {
		return 0, err
	}
	if err := g.readRoster(ctx); err != nil {
		return 0, err
	}
	for i := entryPresent; i < len(g.roster.all); i += entryLen {
		if g.roster.all[i] != 0 {
			count++
		}
	}
	return count, nil
}

// zero returns a tensor of zeros instead of gradient i: in Join the caller's.
func (g *Gradients) zero(i int) (*runtime.Tensor, error) {
	g.step.absent[i] = true
	if g.joining != nil {
		return g.joining[i], g.joining[i].Fill(0)
	}
	t, err := g.spare(i)
	if err != nil {
		return nil, err
	}
	return t, g.place(i, t)
}

// spare returns zeros like gradient i.
func (g *Gradients) spare(i int) (*runtime.Tensor, error) {
	p := &g.gradients[i]
	if p.spare == nil {
		t, err := runtime.New(g.rt, p.dt, p.n)
		if err != nil {
			return nil, err
		}
		p.spare = t
	}
	return p.spare, p.spare.Fill(0)
}

package commtest

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

var faultCases = []testCase{
	{name: "fault: sync ends when the context does", body: interrupted(allReduceAndSync), needs: asynchrony, minRanks: 2},
	{
		name: "fault: receive ends when the context does",
		body: interrupted(func(ctx context.Context, c comm.Communicator, a operands) error {
			return receiveAndSync(ctx, c, a, c.WorldSize()-1)
		}),
		minRanks: 2,
	},
	{
		name: "fault: receive from oneself ends when the context does",
		body: interrupted(func(ctx context.Context, c comm.Communicator, a operands) error {
			return receiveAndSync(ctx, c, a, c.Rank())
		}),
		needs: loneSelfReceive,
	},
	{
		name: "fault: barrier ends when the context does",
		body: interrupted(func(ctx context.Context, c comm.Communicator, _ operands) error {
			return c.Barrier(ctx)
		}),
		minRanks: 2,
	},
	{
		name: "fault: split ends when the context does",
		body: interrupted(func(ctx context.Context, c comm.Communicator, _ operands) error {
			_, err := c.Split(ctx, 0, 0)
			return err
		}),
		minRanks: 2,
	},
	{name: "fault: an ended context breaks nothing when nothing is left", body: endedContext},
	{name: "fault: a rank leaves", body: peerLeaves, minRanks: 2},
	{name: "fault: a rank leaves while others wait", body: peerLeavesMeanwhile, minRanks: 2},
	{name: "fault: a rank aborts before others", body: peerAborts, needs: asynchrony, minRanks: 3},
	{name: "fault: ranks disagree", body: disagreements, needs: detection, minRanks: 2},
	{name: "fault: message of another length or type", body: wrongMessage, needs: detection, minRanks: 2},
}

// Requirements of cases.
var (
	asynchrony = need{
		lacks:  func(b Backend) bool { return b.Synchronous },
		reason: "collectives wait for the other ranks when they are called",
	}
	loneSelfReceive = need{
		lacks:  func(b Backend) bool { return b.NoLoneSelfReceive },
		reason: "the backend takes no receive from oneself without its send",
	}
	detection = need{
		lacks:  func(b Backend) bool { return b.NoMismatch },
		reason: "the backend does not notice when ranks disagree",
	}
	peerFailures = need{
		lacks:  func(b Backend) bool { return b.NoPeerFailure },
		reason: "ranks notice by their deadlines alone that one has aborted",
	}
	tags = need{
		lacks:  func(b Backend) bool { return b.NoTags },
		reason: "the backend matches messages in order alone",
	}
)

// patience is how long a context waits for ranks that never come. They do not
// come however long it is, so no test depends on it.
const patience = 20 * time.Millisecond

// endings are the ways in which a context ends, and the error of each.
var endings = []struct {
	want error
	ctx  func(parent context.Context) (context.Context, context.CancelFunc)
}{
	{comm.ErrTimeout, func(parent context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(parent, patience)
	}},
	{comm.ErrCanceled, func(parent context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(parent)
		time.AfterFunc(patience, cancel)
		return ctx, cancel
	}},
	{comm.ErrCanceled, func(parent context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(parent)
		cancel()
		return ctx, cancel
	}},
}

// interrupted lets rank 0 alone call something that needs all ranks, with a
// context that ends. The call must end with it, and the communicator must be
// aborted from then on: for rank 0, and for the others who come too late. The
// communicator that it was split from is not.
func interrupted(call func(ctx context.Context, c comm.Communicator, a operands) error) func(p *probe) {
	return func(p *probe) {
		a := p.operands(p.sumType(), 5)
		for _, end := range endings {
			c := p.split(0, p.rank)
			if p.rank == 0 {
				ctx, cancel := end.ctx(p.ctx)
				err := call(ctx, c, a)
				cancel()
				p.wantOneOf("waiting for ranks that do not come", err, end.want)
				p.refuses(c, comm.ErrBroken, end.want)
			}
			p.must(p.c.Barrier(p.ctx))
			if p.rank != 0 {
				ctx, cancel := context.WithTimeout(p.ctx, 10*patience)
				err := c.Barrier(ctx)
				cancel()
				if err != nil || !p.suite.NoPeerFailure {
					p.wantOneOf("coming too late", err, comm.ErrPeerFailed, comm.ErrBroken, comm.ErrTimeout)
				}
			}
			p.must(p.c.Barrier(p.ctx))
			if err := c.Close(); err != nil {
				p.errorf("closing an aborted communicator: %v", err)
			}
		}
		p.exercise(p.c)
	}
}

// endedContext waits with a context that has ended when everything is done.
func endedContext(p *probe) {
	ctx, cancel := context.WithCancel(p.ctx)
	cancel()
	c := p.split(0, p.rank)
	p.must(c.Sync(ctx))
	a := p.operands(p.sumType(), 5)
	p.must(allReduceAndSync(p.ctx, c, a))
	p.must(c.Sync(ctx))
	p.must(c.Barrier(p.ctx))
	p.must(c.Close())
}

// wantOneOf checks that err is an OpError that wraps one of the given errors.
func (p *probe) wantOneOf(situation string, err error, want ...error) {
	var e *comm.OpError
	if err != nil && !errors.As(err, &e) {
		p.errorf("%s: error %q is no *comm.OpError", situation, err)
	}
	for _, w := range want {
		if errors.Is(err, w) {
			return
		}
	}
	p.errorf("%s: got %v, want one of %q", situation, err, want)
}

// leaving returns what the peers of a rank that has left get, and a context to
// wait for it.
func (p *probe) leaving() (context.Context, context.CancelFunc, []error) {
	if p.NoPeerFailure {
		ctx, cancel := context.WithTimeout(p.ctx, 4*patience)
		return ctx, cancel, []error{comm.ErrPeerFailed, comm.ErrTimeout}
	}
	// Half the time of the case, so that a rank that nobody tells finds that out
	// before the others end the case, and with it the world.
	ctx, cancel := context.WithTimeout(p.ctx, p.timeout/2)
	return ctx, cancel, []error{comm.ErrPeerFailed}
}

// allReduceAndSync submits an allreduce, waits for it, and returns whichever
// error comes first.
func allReduceAndSync(ctx context.Context, c comm.Communicator, a operands) error {
	return callAndSync(ctx, c, a.allReduce(comm.Sum))
}

func callAndSync(ctx context.Context, c comm.Communicator, call comm.Call) error {
	if err := call.Make(c); err != nil {
		return err
	}
	return c.Sync(ctx)
}

// receiveAndSync waits for a message from src.
func receiveAndSync(ctx context.Context, c comm.Communicator, a operands, src int) error {
	return callAndSync(ctx, c, a.receiveFrom(src, 1))
}

// closeAborted closes a communicator that was aborted, beside which the world works as before.
func (p *probe) closeAborted(c comm.Communicator) {
	p.must(p.c.Barrier(p.ctx))
	p.must(c.Close())
	p.exercise(p.c)
}

// peerLeaves lets the last rank close before the others need it.
func peerLeaves(p *probe) {
	a := p.operands(p.sumType(), 5)
	c := p.split(0, p.rank)
	if p.rank == p.size-1 {
		p.must(c.Close())
	}
	p.must(p.c.Barrier(p.ctx))
	if p.rank != p.size-1 {
		ctx, cancel, want := p.leaving()
		p.wantOneOf("a rank has closed", allReduceAndSync(ctx, c, a), want...)
		cancel()
		p.refuses(c, comm.ErrBroken)
	}
	p.closeAborted(c)
}

// peerLeavesMeanwhile lets the last rank close while the others wait for it, after calls that it
// took part in.
func peerLeavesMeanwhile(p *probe) {
	a := p.operands(p.sumType(), 5)
	c := p.split(0, p.rank)
	p.must(allReduceAndSync(p.ctx, c, a))
	p.must(c.Barrier(p.ctx))
	if p.rank == p.size-1 {
		p.must(c.Close())
	} else {
		ctx, cancel, want := p.leaving()
		p.wantOneOf("a rank closes", allReduceAndSync(ctx, c, a), want...)
		cancel()
	}
	p.closeAborted(c)
}

// peerAborts has all ranks but the last, which stays away, wait for an allreduce. The
// first aborts long before the others would: what it aborts must not look to them as if
// the allreduce were done.
func peerAborts(p *probe) {
	a := p.operands(p.sumType(), 5)
	c := p.split(0, p.rank)
	switch p.rank {
	case p.size - 1:
	case 0:
		ctx, cancel := context.WithTimeout(p.ctx, patience)
		p.wantOneOf("waiting for a rank that stays away", allReduceAndSync(ctx, c, a), comm.ErrTimeout)
		cancel()
	default:
		ctx := p.ctx
		cancel := context.CancelFunc(func() {})
		want := []error{comm.ErrPeerFailed, comm.ErrBroken}
		if p.NoPeerFailure {
			ctx, cancel = context.WithTimeout(p.ctx, 20*patience)
			want = append(want, comm.ErrTimeout)
		}
		p.wantOneOf("another rank has aborted", allReduceAndSync(ctx, c, a), want...)
		cancel()
	}
	p.closeAborted(c)
}

// disagreement is a way in which the last rank is out of step.
type disagreement struct {
	name        string
	normal, odd func(ctx context.Context, c comm.Communicator) error
}

// disagreementsAbout returns all ways.
func disagreementsAbout(a operands) []disagreement {
	makes := func(k comm.Call) func(context.Context, comm.Communicator) error {
		return func(_ context.Context, c comm.Communicator) error {
			return k.Make(c)
		}
	}
	barrier := func(ctx context.Context, c comm.Communicator) error {
		return c.Barrier(ctx)
	}
	split := func(ctx context.Context, c comm.Communicator) error {
		_, err := c.Split(ctx, 0, 0)
		return err
	}
	sum := makes(a.allReduce(comm.Sum))
	gather := makes(a.allGather())
	shorter := a
	shorter.count--
	empty := a
	empty.count = 0
	fewer := a
	fewer.counts = slices.Clone(a.counts)
	fewer.counts[0]--
	retyped := a
	retyped.dt = otherType(a.dt)
	return []disagreement{
		{"count", sum, makes(shorter.allReduce(comm.Sum))},
		{"count zero", gather, makes(empty.allGather())},
		{"operation", sum, makes(a.allReduce(comm.Max))},
		{"root", makes(a.broadcast(0)), makes(a.broadcast(1))},
		{"collective", sum, gather},
		{"barrier or collective", sum, barrier},
		{"barrier or split", barrier, split},
		{"counts of allgatherv", makes(a.allGatherV()), makes(fewer.allGatherV())},
		{"counts of alltoallv", makes(a.allToAllV(a)), makes(a.allToAllV(fewer))},
		{"type", makes(a.allToAll()), makes(retyped.allToAll())},
	}
}

// otherType is a type of the same size as dt.
func otherType(dt dtype.DType) dtype.DType {
	all := dtype.All()
	return all[slices.IndexFunc(all, func(candidate dtype.DType) bool {
		return candidate != dt && candidate.Size() == dt.Size()
	})]
}

// disagreements lets the last rank call something else than the others, in all
// ways: every rank must be told.
func disagreements(p *probe) {
	a := p.operands(p.sumType(), 5)
	for _, d := range disagreementsAbout(a) {
		c := p.split(0, p.rank)
		call := d.normal
		if p.rank == p.size-1 {
			call = d.odd
		}
		err := call(p.ctx, c)
		if err == nil {
			err = c.Sync(p.ctx)
		}
		if err == nil && p.LateMismatch {
			err = c.Barrier(p.ctx)
		}
		p.wantOneOf("ranks disagree about "+d.name, err, comm.ErrMismatch)
		p.refuses(c, comm.ErrBroken, comm.ErrMismatch)
		p.must(p.c.Barrier(p.ctx))
		p.must(c.Close())
	}
	p.exercise(p.c)
}

// wrongMessage sends rank 0 what it does not expect.
func wrongMessage(p *probe) {
	a := p.operands(p.sumType(), 5)
	shorter := a
	shorter.count--
	longer := a
	longer.count++
	retyped := a
	retyped.dt = otherType(a.dt)
	for _, sent := range []operands{shorter, longer, retyped} {
		c := p.split(0, p.rank)
		switch p.rank {
		case 0:
			err := callAndSync(p.ctx, c, a.receiveFrom(1, 7))
			p.wantOneOf("a message of another length or type", err, comm.ErrMismatch)
		case 1:
			// The sender may be told, or be done before it could be.
			err := callAndSync(p.ctx, c, sent.sendTo(0, 7))
			if err != nil {
				p.wantOneOf("sending another length or type", err, comm.ErrMismatch, comm.ErrPeerFailed)
			}
		}
		p.must(p.c.Barrier(p.ctx))
		p.must(c.Close())
	}
	p.exercise(p.c)
}

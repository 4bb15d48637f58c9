package commtest

import (
	"context"
	"errors"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

var misuseCases = []testCase{
	{name: "misuse: every bad argument has its error", body: badArguments},
	{name: "misuse: on one rank alone", body: badArgumentsOnOneRank, minRanks: 2},
}

// namedCall is a call that names the operation it belongs to.
type namedCall struct {
	name   string
	submit func(c comm.Communicator) error
}

// operands are the arguments of a call: memory large enough for all of them.
type operands struct {
	dt         dtype.DType
	count      int
	send, recv uintptr
	// counts and displs have an entry for each rank.
	counts, displs []int
}

// everyCall returns a call of every collective and of messages to oneself.
func everyCall(a operands) []namedCall {
	return []namedCall{
		{"allreduce", func(c comm.Communicator) error { return c.AllReduce(a.send, a.recv, a.count, a.dt, comm.Max) }},
		{"broadcast", func(c comm.Communicator) error { return c.Broadcast(a.recv, a.count, a.dt, 0) }},
		{"reduce", func(c comm.Communicator) error { return c.Reduce(a.send, a.recv, a.count, a.dt, comm.Max, 0) }},
		{"allgather", func(c comm.Communicator) error { return c.AllGather(a.send, a.recv, a.count, a.dt) }},
		{"allgatherv", func(c comm.Communicator) error { return c.AllGatherV(a.send, a.recv, a.counts, a.displs, a.dt) }},
		{"reducescatter", func(c comm.Communicator) error { return c.ReduceScatter(a.send, a.recv, a.count, a.dt, comm.Max) }},
		{"alltoall", func(c comm.Communicator) error { return c.AllToAll(a.send, a.recv, a.count, a.dt) }},
		{"alltoallv", func(c comm.Communicator) error {
			return c.AllToAllV(a.send, a.counts, a.displs, a.recv, a.counts, a.displs, a.dt)
		}},
		{"gather", func(c comm.Communicator) error { return c.Gather(a.send, a.recv, a.count, a.dt, 0) }},
		{"scatter", func(c comm.Communicator) error { return c.Scatter(a.send, a.recv, a.count, a.dt, 0) }},
		{"group", func(c comm.Communicator) error {
			return c.Group(func() error {
				return errors.Join(
					c.Send(a.send, a.count, a.dt, c.Rank(), 1),
					c.Recv(a.recv, a.count, a.dt, c.Rank(), 1),
				)
			})
		}},
	}
}

// everyMethod is everyCall and the methods that wait.
func everyMethod(ctx context.Context, a operands) []namedCall {
	return append(everyCall(a),
		namedCall{"send", func(c comm.Communicator) error { return c.Send(a.send, a.count, a.dt, c.Rank(), 1) }},
		namedCall{"recv", func(c comm.Communicator) error { return c.Recv(a.recv, a.count, a.dt, c.Rank(), 1) }},
		namedCall{"sync", func(c comm.Communicator) error { return c.Sync(ctx) }},
		namedCall{"barrier", func(c comm.Communicator) error { return c.Barrier(ctx) }},
		namedCall{"split", func(c comm.Communicator) error { _, err := c.Split(ctx, 0, 0); return err }},
	)
}

// operands returns arguments for calls with count elements per rank.
func (p *probe) operands(dt dtype.DType, count int) operands {
	bytes := make([]byte, p.size*count*dt.Size())
	a := operands{dt: dt, count: count, send: p.alloc(bytes), recv: p.alloc(bytes)}
	for r := range p.size {
		a.counts = append(a.counts, count)
		a.displs = append(a.displs, r*count)
	}
	p.settle()
	return a
}

// badCall is a misuse and the error it must give.
type badCall struct {
	namedCall
	why  string
	want error
}

// badCalls returns every way to misuse the collectives that this rank can find
// out alone.
func (p *probe) badCalls() []badCall {
	var bad []badCall
	add := func(name, why string, want error, submit func(c comm.Communicator) error) {
		bad = append(bad, badCall{namedCall{name, submit}, why, want})
	}
	good := p.operands(p.sumType(), 4)
	bytes := uintptr(good.dt.Size())

	vary := func(why string, want error, change func(a *operands)) {
		a := good
		change(&a)
		for _, call := range everyCall(a) {
			if call.name != "group" {
				add(call.name, why, want, call.submit)
			}
		}
		add("send", why, want, func(c comm.Communicator) error { return c.Send(a.send, a.count, a.dt, 0, 0) })
		add("recv", why, want, func(c comm.Communicator) error { return c.Recv(a.recv, a.count, a.dt, 0, 0) })
	}
	vary("negative count", comm.ErrArgument, func(a *operands) {
		a.count = -1
		a.counts = append([]int{}, a.counts...)
		a.counts[p.size-1] = -1
	})
	vary("count beyond the address space", comm.ErrArgument, func(a *operands) {
		a.count = math.MaxInt / 2
		a.counts = append([]int{}, a.counts...)
		a.counts[0] = math.MaxInt / 2
	})
	vary("no such type", comm.ErrArgument, func(a *operands) { a.dt = dtype.Invalid })
	vary("no such type", comm.ErrArgument, func(a *operands) { a.dt = dtype.DType(200) })
	vary("nil buffers", comm.ErrArgument, func(a *operands) { a.send, a.recv = 0, 0 })

	p.badPairs(good, bytes, add)
	p.badRoots(good, add)
	p.badReductions(good, add)
	p.badLayouts(good, add)
	return bad
}

type addBadCall func(name, why string, want error, submit func(c comm.Communicator) error)

// badPairs: one of two buffers is nil, or they overlap.
func (p *probe) badPairs(good operands, bytes uintptr, add addBadCall) {
	for _, pair := range []struct {
		why        string
		send, recv uintptr
	}{
		{"overlapping buffers", good.send, good.send + bytes},
		{"nil send", 0, good.recv},
		{"nil recv", good.send, 0},
	} {
		a := good
		a.send, a.recv = pair.send, pair.recv
		for _, call := range []namedCall{
			{"allreduce", func(c comm.Communicator) error { return c.AllReduce(a.send, a.recv, a.count, a.dt, comm.Max) }},
			{"reduce", func(c comm.Communicator) error { return c.Reduce(a.send, a.recv, a.count, a.dt, comm.Max, c.Rank()) }},
			{"alltoall", func(c comm.Communicator) error { return c.AllToAll(a.send, a.recv, a.count, a.dt) }},
			{"alltoallv", func(c comm.Communicator) error {
				return c.AllToAllV(a.send, a.counts, a.displs, a.recv, a.counts, a.displs, a.dt)
			}},
		} {
			add(call.name, pair.why, comm.ErrArgument, call.submit)
		}
	}
	// Here in place means that the part lies where it belongs in the whole: any
	// other place is wrong.
	part := good.send + uintptr(p.rank*good.count)*bytes + bytes
	whole := good.send
	add("allgather", "part in the wrong place", comm.ErrArgument, func(c comm.Communicator) error {
		return c.AllGather(part, whole, good.count, good.dt)
	})
	add("gather", "part in the wrong place", comm.ErrArgument, func(c comm.Communicator) error {
		return c.Gather(part, whole, good.count, good.dt, c.Rank())
	})
	add("allgatherv", "part in the wrong place", comm.ErrArgument, func(c comm.Communicator) error {
		return c.AllGatherV(part, whole, good.counts, good.displs, good.dt)
	})
	add("reducescatter", "part in the wrong place", comm.ErrArgument, func(c comm.Communicator) error {
		return c.ReduceScatter(whole, part, good.count, good.dt, comm.Max)
	})
	add("scatter", "part in the wrong place", comm.ErrArgument, func(c comm.Communicator) error {
		return c.Scatter(whole, part, good.count, good.dt, c.Rank())
	})
	add("alltoall", "in place", comm.ErrArgument, func(c comm.Communicator) error {
		return c.AllToAll(whole, whole, good.count, good.dt)
	})
	add("alltoallv", "in place", comm.ErrArgument, func(c comm.Communicator) error {
		return c.AllToAllV(whole, good.counts, good.displs, whole, good.counts, good.displs, good.dt)
	})
}

// badRoots: the other rank does not exist.
func (p *probe) badRoots(a operands, add addBadCall) {
	for _, r := range []int{-1, p.size, math.MaxInt, math.MinInt} {
		why := "no such rank"
		add("broadcast", why, comm.ErrArgument, func(c comm.Communicator) error { return c.Broadcast(a.send, a.count, a.dt, r) })
		add("reduce", why, comm.ErrArgument, func(c comm.Communicator) error {
			return c.Reduce(a.send, a.recv, a.count, a.dt, comm.Max, r)
		})
		add("gather", why, comm.ErrArgument, func(c comm.Communicator) error { return c.Gather(a.send, a.recv, a.count, a.dt, r) })
		add("scatter", why, comm.ErrArgument, func(c comm.Communicator) error { return c.Scatter(a.send, a.recv, a.count, a.dt, r) })
		add("send", why, comm.ErrArgument, func(c comm.Communicator) error { return c.Send(a.send, a.count, a.dt, r, 0) })
		add("recv", why, comm.ErrArgument, func(c comm.Communicator) error { return c.Recv(a.recv, a.count, a.dt, r, 0) })
	}
}

// badReductions: the operation does not exist, or not on that type.
func (p *probe) badReductions(a operands, add addBadCall) {
	reducing := func(why string, want error, dt dtype.DType, op comm.ReduceOp) {
		add("allreduce", why, want, func(c comm.Communicator) error { return c.AllReduce(a.send, a.recv, a.count, dt, op) })
		add("reduce", why, want, func(c comm.Communicator) error { return c.Reduce(a.send, a.recv, a.count, dt, op, 0) })
		add("reducescatter", why, want, func(c comm.Communicator) error { return c.ReduceScatter(a.send, a.recv, a.count, dt, op) })
	}
	reducing("no such reduction", comm.ErrArgument, a.dt, comm.ReduceOp(77))
	for _, dt := range p.types() {
		if !dt.IsFloat() && dt.Size() <= a.dt.Size() {
			reducing("average of "+dt.String(), comm.ErrUnsupported, dt, comm.Avg)
		}
	}
}

// badLayouts: counts and displacements do not fit.
func (p *probe) badLayouts(a operands, add addBadCall) {
	layouts := func(why string, counts, displs []int) {
		add("allgatherv", why, comm.ErrArgument, func(c comm.Communicator) error {
			return c.AllGatherV(a.send, a.recv, counts, displs, a.dt)
		})
		add("alltoallv", why+" of send", comm.ErrArgument, func(c comm.Communicator) error {
			return c.AllToAllV(a.send, counts, displs, a.recv, a.counts, a.displs, a.dt)
		})
		add("alltoallv", why+" of recv", comm.ErrArgument, func(c comm.Communicator) error {
			return c.AllToAllV(a.send, a.counts, a.displs, a.recv, counts, displs, a.dt)
		})
	}
	layouts("too few counts", a.counts[1:], a.displs)
	layouts("too many counts", append(slices.Clone(a.counts), 1), a.displs)
	layouts("too few displacements", a.counts, a.displs[1:])
	layouts("too many displacements", a.counts, append(slices.Clone(a.displs), 1))
	layouts("no displacements", a.counts, nil)
	negative := slices.Clone(a.displs)
	negative[0] = -1
	layouts("negative displacement", a.counts, negative)
	huge := slices.Clone(a.displs)
	huge[p.size-1] = math.MaxInt - 1
	layouts("displacement beyond the address space", a.counts, huge)

	if p.size > 1 {
		same := slices.Clone(a.displs)
		same[0] = same[1] + a.counts[1] - 1
		add("allgatherv", "regions that overlap", comm.ErrArgument, func(c comm.Communicator) error {
			return c.AllGatherV(a.send, a.recv, a.counts, same, a.dt)
		})
		add("alltoallv", "regions of recv that overlap", comm.ErrArgument, func(c comm.Communicator) error {
			return c.AllToAllV(a.send, a.counts, a.displs, a.recv, a.counts, same, a.dt)
		})
	}

	other := slices.Clone(a.counts)
	other[p.rank]--
	add("alltoallv", "sends itself more than it receives", comm.ErrArgument, func(c comm.Communicator) error {
		return c.AllToAllV(a.send, a.counts, a.displs, a.recv, other, a.displs, a.dt)
	})
}

// badArguments calls everything wrongly, alone and in a group, and then checks
// that the communicator works as if nothing had been.
func badArguments(p *probe) {
	for _, bad := range p.badCalls() {
		p.checkBad(bad, bad.submit(p.c))
		err := p.c.Group(func() error { return bad.submit(p.c) })
		if !errors.Is(err, bad.want) {
			p.errorf("%s with %s in a group: got %v, want %v", bad.name, bad.why, err, bad.want)
		}
	}
	p.exercise(p.c)
}

// badArgumentsOnOneRank lets one rank misuse the communicator: nothing was
// sent, so the next correct call of all ranks finds them in step.
func badArgumentsOnOneRank(p *probe) {
	bad := p.badCalls()
	for who := range min(p.size, 3) {
		if who == p.rank {
			for _, b := range bad {
				p.checkBad(b, b.submit(p.c))
			}
		}
		p.exercise(p.c)
	}
}

// checkBad checks what a bad call returned.
func (p *probe) checkBad(bad badCall, err error) {
	if !errors.Is(err, bad.want) {
		p.errorf("%s with %s: got %v, want %v", bad.name, bad.why, err, bad.want)
		return
	}
	var e *comm.OpError
	switch {
	case !errors.As(err, &e):
		p.errorf("%s with %s: error %q is no *comm.OpError", bad.name, bad.why, err)
	case e.Op != bad.name || e.Rank != p.rank:
		p.errorf("%s with %s: OpError says %q on rank %d", bad.name, bad.why, e.Op, e.Rank)
	case p.Name != "" && e.Backend != p.Name:
		p.errorf("%s with %s: OpError says backend %q, want %q", bad.name, bad.why, e.Backend, p.Name)
	}
}

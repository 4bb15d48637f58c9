package commtest

import (
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

// operands are the arguments of a call: memory large enough for all of them.
type operands struct {
	dt         dtype.DType
	count      int
	send, recv uintptr
	// counts and displs have an entry for each rank.
	counts, displs []int
}

// everyCollective returns a call of every collective.
func everyCollective(a operands) []comm.Call {
	return []comm.Call{
		comm.AllReduceCall(a.send, a.recv, a.count, a.dt, comm.Max),
		comm.BroadcastCall(a.recv, a.count, a.dt, 0),
		comm.ReduceCall(a.send, a.recv, a.count, a.dt, comm.Max, 0),
		comm.AllGatherCall(a.send, a.recv, a.count, a.dt),
		comm.AllGatherVCall(a.send, a.recv, a.counts, a.displs, a.dt),
		comm.ReduceScatterCall(a.send, a.recv, a.count, a.dt, comm.Max),
		comm.AllToAllCall(a.send, a.recv, a.count, a.dt),
		comm.AllToAllVCall(a.send, a.counts, a.displs, a.recv, a.counts, a.displs, a.dt),
		comm.GatherCall(a.send, a.recv, a.count, a.dt, 0),
		comm.ScatterCall(a.send, a.recv, a.count, a.dt, 0),
	}
}

// everyMethod returns all methods of a communicator by name, those that move
// data with the given operands.
func (p *probe) everyMethod(c comm.Communicator, a operands) map[string]func() error {
	send := comm.SendCall(a.send, a.count, a.dt, c.Rank(), 1)
	recv := comm.RecvCall(a.recv, a.count, a.dt, c.Rank(), 1)
	methods := map[string]func() error{
		"group":       func() error { return c.Group(send, recv) },
		"empty group": func() error { return c.Group() },
		"sync":        func() error { return c.Sync(p.ctx) },
		"barrier":     func() error { return c.Barrier(p.ctx) },
		"split": func() error {
			_, err := c.Split(p.ctx, 0, 0)
			return err
		},
	}
	for _, call := range append(everyCollective(a), send, recv) {
		methods[call.Op.String()] = func() error { return call.Make(c) }
	}
	return methods
}

// operands returns arguments for calls with count elements per rank.
func (p *probe) operands(dt dtype.DType, count int) operands {
	bytes := make([]byte, p.size*count*dt.Size())
	a := operands{
		dt:    dt,
		count: count,
		send:  p.alloc(bytes),
		recv:  p.alloc(bytes),
	}
	for r := range p.size {
		a.counts = append(a.counts, count)
		a.displs = append(a.displs, r*count)
	}
	p.settle()
	return a
}

// badCall is a misuse and the error it must give.
type badCall struct {
	comm.Call
	misuse string
	want   error
}

// badCalls returns every way to misuse the collectives that this rank can find
// out alone.
func (p *probe) badCalls() []badCall {
	var bad []badCall
	add := func(misuse string, want error, call comm.Call) {
		bad = append(bad, badCall{call, misuse, want})
	}
	good := p.operands(p.sumType(), 4)
	bytes := uintptr(good.dt.Size())

	vary := func(misuse string, want error, change func(a *operands)) {
		a := good
		change(&a)
		for _, call := range everyCollective(a) {
			add(misuse, want, call)
		}
		add(misuse, want, comm.SendCall(a.send, a.count, a.dt, 0, 0))
		add(misuse, want, comm.RecvCall(a.recv, a.count, a.dt, 0, 0))
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
	vary("nil buffers", comm.ErrArgument, func(a *operands) {
		a.send = 0
		a.recv = 0
	})

	p.badPairs(good, bytes, add)
	p.badRoots(good, add)
	p.badReductions(good, add)
	p.badLayouts(good, add)
	return bad
}

type addBadCall func(misuse string, want error, call comm.Call)

// badPairs: one of two buffers is nil, or they overlap.
func (p *probe) badPairs(good operands, bytes uintptr, add addBadCall) {
	for _, pair := range []struct {
		misuse     string
		send, recv uintptr
	}{
		{"overlapping buffers", good.send, good.send + bytes},
		{"nil send", 0, good.recv},
		{"nil recv", good.send, 0},
	} {
		a := good
		a.send = pair.send
		a.recv = pair.recv
		for _, call := range []comm.Call{
			comm.AllReduceCall(a.send, a.recv, a.count, a.dt, comm.Max),
			comm.ReduceCall(a.send, a.recv, a.count, a.dt, comm.Max, p.rank),
			comm.AllToAllCall(a.send, a.recv, a.count, a.dt),
			comm.AllToAllVCall(a.send, a.counts, a.displs, a.recv, a.counts, a.displs, a.dt),
		} {
			add(pair.misuse, comm.ErrArgument, call)
		}
	}
	// Here in place means that the part lies where it belongs in the whole: any
	// other place is wrong.
	part := good.send + uintptr(p.rank*good.count)*bytes + bytes
	whole := good.send
	add("part in the wrong place", comm.ErrArgument, comm.AllGatherCall(part, whole, good.count, good.dt))
	add("part in the wrong place", comm.ErrArgument, comm.GatherCall(part, whole, good.count, good.dt, p.rank))
	add("part in the wrong place", comm.ErrArgument, comm.AllGatherVCall(part, whole, good.counts, good.displs, good.dt))
	add("part in the wrong place", comm.ErrArgument, comm.ReduceScatterCall(whole, part, good.count, good.dt, comm.Max))
	add("part in the wrong place", comm.ErrArgument, comm.ScatterCall(whole, part, good.count, good.dt, p.rank))
	add("in place", comm.ErrArgument, comm.AllToAllCall(whole, whole, good.count, good.dt))
	add(
		"in place",
		comm.ErrArgument,
		comm.AllToAllVCall(whole, good.counts, good.displs, whole, good.counts, good.displs, good.dt),
	)
}

// badRoots: the other rank does not exist.
func (p *probe) badRoots(a operands, add addBadCall) {
	for _, r := range []int{-1, p.size, math.MaxInt, math.MinInt} {
		misuse := "no such rank"
		add(misuse, comm.ErrArgument, comm.BroadcastCall(a.send, a.count, a.dt, r))
		add(misuse, comm.ErrArgument, comm.ReduceCall(a.send, a.recv, a.count, a.dt, comm.Max, r))
		add(misuse, comm.ErrArgument, comm.GatherCall(a.send, a.recv, a.count, a.dt, r))
		add(misuse, comm.ErrArgument, comm.ScatterCall(a.send, a.recv, a.count, a.dt, r))
		add(misuse, comm.ErrArgument, comm.SendCall(a.send, a.count, a.dt, r, 0))
		add(misuse, comm.ErrArgument, comm.RecvCall(a.recv, a.count, a.dt, r, 0))
	}
}

// badReductions: the operation does not exist, or not on that type.
func (p *probe) badReductions(a operands, add addBadCall) {
	reducing := func(misuse string, want error, dt dtype.DType, op comm.ReduceOp) {
		add(misuse, want, comm.AllReduceCall(a.send, a.recv, a.count, dt, op))
		add(misuse, want, comm.ReduceCall(a.send, a.recv, a.count, dt, op, 0))
		add(misuse, want, comm.ReduceScatterCall(a.send, a.recv, a.count, dt, op))
	}
	reducing("no such reduction", comm.ErrArgument, a.dt, comm.ReduceOp(77))
	for _, dt := range dtype.All() {
		if !dt.IsFloat() && dt.Size() <= a.dt.Size() {
			reducing("average of "+dt.String(), comm.ErrUnsupported, dt, comm.Avg)
		}
	}
}

// badLayouts: counts and displacements do not fit.
func (p *probe) badLayouts(a operands, add addBadCall) {
	layouts := func(misuse string, counts, displs []int) {
		add(misuse, comm.ErrArgument, comm.AllGatherVCall(a.send, a.recv, counts, displs, a.dt))
		add(misuse+" of send", comm.ErrArgument, comm.AllToAllVCall(a.send, counts, displs, a.recv, a.counts, a.displs, a.dt))
		add(misuse+" of recv", comm.ErrArgument, comm.AllToAllVCall(a.send, a.counts, a.displs, a.recv, counts, displs, a.dt))
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
		overlapping := slices.Clone(a.displs)
		overlapping[0] = overlapping[1] + a.counts[1] - 1
		add("regions that overlap", comm.ErrArgument, comm.AllGatherVCall(a.send, a.recv, a.counts, overlapping, a.dt))
		add(
			"regions of recv that overlap",
			comm.ErrArgument,
			comm.AllToAllVCall(a.send, a.counts, a.displs, a.recv, a.counts, overlapping, a.dt),
		)
	}

	unequal := slices.Clone(a.counts)
	unequal[p.rank]--
	add(
		"sends itself more than it receives",
		comm.ErrArgument,
		comm.AllToAllVCall(a.send, a.counts, a.displs, a.recv, unequal, a.displs, a.dt),
	)
}

// badArguments calls everything wrongly, alone and in a group, and then checks
// that the communicator works as if nothing had been.
func badArguments(p *probe) {
	for _, bad := range p.badCalls() {
		p.checkBad(bad, bad.Make(p.c))
		p.checkBad(bad, p.c.Group(bad.Call))
	}
	p.exercise(p.c)
}

// badArgumentsOnOneRank lets one rank misuse the communicator: nothing was
// sent, so the next correct call of all ranks finds them in step.
func badArgumentsOnOneRank(p *probe) {
	bad := p.badCalls()
	for culprit := range min(p.size, 3) {
		if culprit == p.rank {
			for _, b := range bad {
				p.checkBad(b, b.Make(p.c))
			}
		}
		p.exercise(p.c)
	}
}

// checkBad checks what a bad call returned.
func (p *probe) checkBad(bad badCall, err error) {
	if !errors.Is(err, bad.want) {
		p.errorf("%s with %s: got %v, want %v", bad.Op, bad.misuse, err, bad.want)
		return
	}
	var e *comm.OpError
	switch {
	case !errors.As(err, &e):
		p.errorf("%s with %s: error %q is no *comm.OpError", bad.Op, bad.misuse, err)
	case e.Op != bad.Op.String() || e.Rank != p.rank:
		p.errorf("%s with %s: OpError says %q on rank %d", bad.Op, bad.misuse, e.Op, e.Rank)
	case p.Name != "" && e.Backend != p.Name:
		p.errorf("%s with %s: OpError says backend %q, want %q", bad.Op, bad.misuse, e.Backend, p.Name)
	}
}

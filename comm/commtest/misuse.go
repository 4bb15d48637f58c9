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

func (a operands) allReduce(op comm.ReduceOp) comm.Call {
	return comm.AllReduceCall(a.send, a.recv, a.count, a.dt, op)
}

func (a operands) broadcast(root int) comm.Call {
	return comm.BroadcastCall(a.recv, a.count, a.dt, root)
}

func (a operands) reduce(op comm.ReduceOp, root int) comm.Call {
	return comm.ReduceCall(a.send, a.recv, a.count, a.dt, op, root)
}

func (a operands) allGather() comm.Call {
	return comm.AllGatherCall(a.send, a.recv, a.count, a.dt)
}

func (a operands) allGatherV() comm.Call {
	return comm.AllGatherVCall(a.send, a.recv, a.counts, a.displs, a.dt)
}

func (a operands) reduceScatter(op comm.ReduceOp) comm.Call {
	return comm.ReduceScatterCall(a.send, a.recv, a.count, a.dt, op)
}

func (a operands) allToAll() comm.Call {
	return comm.AllToAllCall(a.send, a.recv, a.count, a.dt)
}

// allToAllV receives what the operands say, and sends by other ones.
func (a operands) allToAllV(sent operands) comm.Call {
	return comm.AllToAllVCall(a.send, sent.counts, sent.displs, a.recv, a.counts, a.displs, a.dt)
}

func (a operands) gather(root int) comm.Call {
	return comm.GatherCall(a.send, a.recv, a.count, a.dt, root)
}

func (a operands) scatter(root int) comm.Call {
	return comm.ScatterCall(a.send, a.recv, a.count, a.dt, root)
}

func (a operands) sendTo(dest int, tag uint32) comm.Call {
	return comm.SendCall(a.send, a.count, a.dt, dest, tag)
}

func (a operands) receiveFrom(src int, tag uint32) comm.Call {
	return comm.RecvCall(a.recv, a.count, a.dt, src, tag)
}

// everyCollective returns a call of every collective.
func everyCollective(a operands) []comm.Call {
	return []comm.Call{
		a.allReduce(comm.Max),
		a.broadcast(0),
		a.reduce(comm.Max, 0),
		a.allGather(),
		a.allGatherV(),
		a.reduceScatter(comm.Max),
		a.allToAll(),
		a.allToAllV(a),
		a.gather(0),
		a.scatter(0),
	}
}

// everyMethod returns all methods of a communicator by name, those that move
// data with the given operands.
func (p *probe) everyMethod(c comm.Communicator, a operands) map[string]func() error {
	send := a.sendTo(c.Rank(), 1)
	recv := a.receiveFrom(c.Rank(), 1)
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
	p.awaitCopies()
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
	add := func(misuse string, want error, calls ...comm.Call) {
		for _, call := range calls {
			bad = append(bad, badCall{call, misuse, want})
		}
	}
	good := p.operands(p.sumType(), 4)
	p.badOperands(good, add)
	p.badPairs(good, add)
	p.badRoots(good, add)
	p.badReductions(good, add)
	p.badLayouts(good, add)
	return bad
}

type addBadCall func(misuse string, want error, calls ...comm.Call)

// badOperands: a count, a type or the buffers are none.
func (p *probe) badOperands(good operands, add addBadCall) {
	every := func(misuse string, a operands) {
		add(misuse, comm.ErrArgument, everyCollective(a)...)
		add(misuse, comm.ErrArgument, a.sendTo(0, 0), a.receiveFrom(0, 0))
	}

	a := good
	a.count = -1
	a.counts = slices.Clone(good.counts)
	a.counts[p.size-1] = -1
	every("negative count", a)

	a = good
	a.count = math.MaxInt / 2
	a.counts = slices.Clone(good.counts)
	a.counts[0] = math.MaxInt / 2
	every("count beyond the address space", a)

	for _, dt := range []dtype.DType{dtype.Invalid, dtype.DType(200)} {
		a = good
		a.dt = dt
		every("no such type", a)
	}

	a = good
	a.send = 0
	a.recv = 0
	every("nil buffers", a)
}

// badPairs: one of two buffers is nil, or they overlap.
func (p *probe) badPairs(good operands, add addBadCall) {
	pair := func(misuse string, send, recv uintptr) {
		a := good
		a.send = send
		a.recv = recv
		add(
			misuse,
			comm.ErrArgument,
			a.allReduce(comm.Max),
			a.reduce(comm.Max, p.rank),
			a.allToAll(),
			a.allToAllV(a),
		)
	}
	element := uintptr(good.dt.Size())
	pair("overlapping buffers", good.send, good.send+element)
	pair("nil send", 0, good.recv)
	pair("nil recv", good.send, 0)

	// Here in place means that the part lies where it belongs in the whole: any
	// other place is wrong.
	whole := good.send
	part := whole + uintptr(p.rank*good.count)*element + element
	a := good
	a.send = part
	a.recv = whole
	add("part in the wrong place", comm.ErrArgument, a.allGather(), a.gather(p.rank), a.allGatherV())
	a.send = whole
	a.recv = part
	add("part in the wrong place", comm.ErrArgument, a.reduceScatter(comm.Max), a.scatter(p.rank))
	a.recv = whole
	add("in place", comm.ErrArgument, a.allToAll(), a.allToAllV(a))
}

// badRoots: the other rank does not exist.
func (p *probe) badRoots(a operands, add addBadCall) {
	for _, r := range []int{-1, p.size, math.MaxInt, math.MinInt} {
		const misuse = "no such rank"
		add(
			misuse,
			comm.ErrArgument,
			a.broadcast(r),
			a.reduce(comm.Max, r),
			a.gather(r),
			a.scatter(r),
		)
		add(misuse, comm.ErrArgument, a.sendTo(r, 0), a.receiveFrom(r, 0))
	}
}

// badReductions: the operation does not exist, or not on that type.
func (p *probe) badReductions(good operands, add addBadCall) {
	every := func(misuse string, want error, a operands, op comm.ReduceOp) {
		add(
			misuse,
			want,
			a.allReduce(op),
			a.reduce(op, 0),
			a.reduceScatter(op),
		)
	}
	every("no such reduction", comm.ErrArgument, good, comm.ReduceOp(77))
	for _, dt := range dtype.All() {
		if dt.IsFloat() || dt.Size() > good.dt.Size() {
			continue
		}
		a := good
		a.dt = dt
		every("average of "+dt.String(), comm.ErrUnsupported, a, comm.Avg)
	}
}

// badLayouts: counts and displacements do not fit.
func (p *probe) badLayouts(good operands, add addBadCall) {
	layout := func(misuse string, counts, displs []int) {
		a := good
		a.counts = counts
		a.displs = displs
		add(misuse, comm.ErrArgument, a.allGatherV())
		add(misuse+" of send", comm.ErrArgument, good.allToAllV(a))
		add(misuse+" of recv", comm.ErrArgument, a.allToAllV(good))
	}
	counts := good.counts
	displs := good.displs
	layout("too few counts", counts[1:], displs)
	layout("too many counts", append(slices.Clone(counts), 1), displs)
	layout("too few displacements", counts, displs[1:])
	layout("too many displacements", counts, append(slices.Clone(displs), 1))
	layout("no displacements", counts, nil)
	negative := slices.Clone(displs)
	negative[0] = -1
	layout("negative displacement", counts, negative)
	huge := slices.Clone(displs)
	huge[p.size-1] = math.MaxInt - 1
	layout("displacement beyond the address space", counts, huge)

	if p.size > 1 {
		overlapping := good
		overlapping.displs = slices.Clone(displs)
		overlapping.displs[0] = displs[1] + counts[1] - 1
		add("regions that overlap", comm.ErrArgument, overlapping.allGatherV())
		add("regions of recv that overlap", comm.ErrArgument, overlapping.allToAllV(good))
	}

	unequal := good
	unequal.counts = slices.Clone(counts)
	unequal.counts[p.rank]--
	add("sends itself more than it receives", comm.ErrArgument, unequal.allToAllV(good))
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

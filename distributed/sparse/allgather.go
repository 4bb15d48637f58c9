package sparse

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// allgather collects a list of every rank on every rank.
type allgather struct {
	*engine
	lengths, displs []int
	recv, packed    base.Buffer
	words           int               // of a message of collectInPlace
	lists           []runtime.Entries // per rank, in rank order
}

func newAllgather(e *engine) *allgather {
	return &allgather{engine: e, lengths: make([]int, e.size), displs: make([]int, e.size), lists: make([]runtime.Entries, e.size)}
}

// collectInPlace is collect for messages of equal length, of which each rank has
// picked its own where it belongs ([allgatherExchange.placePicks]). The compute
// stream does not wait yet.
func (g *allgather) collectInPlace(ctx context.Context) {
	if g.err == nil {
		first := g.shared.Ptr
		g.add(comm.AllGatherCall(base.At(first, g.rank*g.words), first, g.words, dtype.I32))
		g.submit(ctx)
	}
}

// exchangeLengths fills g.lengths with the length of every rank's list, which the
// host waits for, and returns their sum. limit says how long they can be.
func (g *allgather) exchangeLengths(ctx context.Context, mine runtime.Entries, limit func(rank int) int) int {
	g.communicate(ctx, comm.AllGatherCall(mine.Len, g.at(g.received), 1, dtype.I32))
	g.read(ctx)
	for r, n := range g.checkWords(g.received, g.size, limit, "its number of entries") {
		g.lengths[r] = int(n)
	}
	return base.Displacements(g.lengths, g.displs)
}

// collect makes every rank's list known to every rank, with the lengths in g.lengths, indices and
// values apart. The result holds the lists one after the other; g.lists has
// them one by one.
func (g *allgather) collect(ctx context.Context, mine runtime.Entries) runtime.Entries {
	total := base.Displacements(g.lengths, g.displs)
	g.allocate(&g.recv, 2*total*base.WordSize)
	all := runtime.Entries{Idx: g.recv.Ptr, Val: base.At(g.recv.Ptr, total), N: total}
	for r, n := range g.lengths {
		g.lists[r] = part(all, g.displs[r], g.displs[r]+n)
	}
	g.add(comm.AllGatherVCall(mine.Idx, all.Idx, g.lengths, g.displs, dtype.I32))
	g.add(comm.AllGatherVCall(mine.Val, all.Val, g.lengths, g.displs, dtype.F32))
	g.together(ctx)
	return all
}

// collectPacked is collect with one message per rank, which holds its indices
// and behind them the bits of its values, as I32 words.
func (g *allgather) collectPacked(ctx context.Context, mine runtime.Entries) {
	n := g.lengths[g.rank]
	g.allocate(&g.packed, 2*n*base.WordSize)
	g.copy(g.packed.Ptr, mine.Idx, n)
	g.copy(base.At(g.packed.Ptr, n), mine.Val, n)
	for r := range g.lengths {
		g.lengths[r] *= 2
	}
	total := base.Displacements(g.lengths, g.displs)
	g.allocate(&g.recv, total*base.WordSize)
	g.communicate(ctx, comm.AllGatherVCall(g.packed.Ptr, g.recv.Ptr, g.lengths, g.displs, dtype.I32))
	for r := range g.lists {
		first, n := base.At(g.recv.Ptr, g.displs[r]), g.lengths[r]/2
		g.lists[r] = runtime.Entries{Idx: first, Val: base.At(first, n), N: n}
	}
}

// allgatherExchange sends all picks everywhere, where they are added up.
type allgatherExchange struct {
	*allgather
	fixed  bool // all ranks pick equally many, so lengths need not travel
	packed bool // indices and values in one message
	again  bool // only the top k of the sum go into the result

	sum    message
	global message
	top    [1]runtime.Entries
}

func allgatherEqual(e *engine) exchange {
	return &allgatherExchange{allgather: newAllgather(e), fixed: true}
}

func allgatherAgain(e *engine) exchange {
	return &allgatherExchange{allgather: newAllgather(e), fixed: true, again: true}
}

func allgatherSized(e *engine) exchange { return &allgatherExchange{allgather: newAllgather(e)} }

func allgatherPacked(e *engine) exchange {
	return &allgatherExchange{allgather: newAllgather(e), packed: true}
}

// placePicks has the lists of all ranks in one array if they travel at their
// capacity: in symmetric memory where there is such. Lengths that are not known
// stand in front.
func (x *allgatherExchange) placePicks(ctx context.Context, n int) runtime.Entries {
	if !x.fixed && x.order.Streams == nil {
		return x.engine.placePicks(ctx, n)
	}
	header := headerWords
	if x.fixed {
		header = 0
	}
	x.words = header + 2*n
	x.share(ctx, x.words*x.size*base.WordSize)
	if x.err != nil {
		return runtime.Entries{}
	}
	for r := range x.lists {
		first := base.At(x.shared.Ptr, r*x.words)
		x.lists[r] = runtime.Entries{Idx: base.At(first, header), Val: base.At(first, header+n), N: n}
		if !x.fixed {
			x.lists[r].Len = first
		}
	}
	return x.lists[x.rank]
}

func (x *allgatherExchange) run(ctx context.Context, picks runtime.Entries) result {
	switch {
	case x.fixed || x.order.Streams != nil:
		x.collectInPlace(ctx)
	default:
		x.exchangeLengths(ctx, picks, func(int) int { return picks.N }) // all have room for as many
		if x.packed {
			x.collectPacked(ctx, picks)
		} else {
			x.collect(ctx, picks)
		}
	}
	if !x.again {
		return result{lists: x.lists, scale: x.average}
	}
	x.arrive(ctx)
	// The sum is the same on every rank, and so are its largest entries: no fewer
	// than picks, which are as many on each rank.
	sum := x.message(&x.sum, min(picks.N*x.size, x.n))
	x.union(sum, x.lists, x.average, 0)
	x.top[0] = exactly(x.message(&x.global, picks.N), picks.N)
	x.topOf(sum, picks.N, x.top[0])
	x.giveBack(picks, x.top[0])
	return result{lists: x.top[:], scale: 1}
}

// sumExchange reduces the whole residual, densely, whatever was picked.
type sumExchange struct{ *engine }

func sumAll(e *engine) exchange { return sumExchange{e} }

func (x sumExchange) run(ctx context.Context, _ runtime.Entries) result {
	sum := x.denseResult()
	x.copy(sum, x.residual, x.n)
	x.fill(x.residual, x.n)
	x.communicate(ctx, comm.AllReduceCall(sum, sum, x.n, dtype.F32, comm.Avg))
	return result{dense: sum}
}

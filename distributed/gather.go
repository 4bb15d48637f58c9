package distributed

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// gatherer collects a list of every rank on every rank.
type gatherer struct {
	*engine
	counts, displs []int
	equal          bool // all counts are the same
	recv, packed   listBuffer
	lists          []list // per rank, in rank order

	// What submit works on: a Group takes a function, and one made per step
	// would be an allocation per step.
	mine, all list
	submit    func() error
}

func newGatherer(e *engine) *gatherer {
	g := &gatherer{engine: e, counts: make([]int, e.size), displs: make([]int, e.size), lists: make([]list, e.size)}
	g.submit = g.submitLists
	return g
}

// exchangeCounts fills g.counts with every rank's n and returns their sum.
func (g *gatherer) exchangeCounts(ctx context.Context, n int) int {
	g.host[0] = int32(n)
	counts := g.allGatherWords(ctx, 1)
	g.checkWords(counts, g.n, "its number of entries")
	for r, count := range counts {
		g.counts[r] = int(count)
	}
	g.equal = false
	return layoutOf(g.counts, g.displs)
}

// sameCounts fills g.counts with n for every rank.
func (g *gatherer) sameCounts(n int) {
	for r := range g.counts {
		g.counts[r] = n
	}
	g.equal = true
}

// collect gathers every rank's list, with the lengths in g.counts, indices and
// values apart. The result holds the lists one after the other; g.lists has
// them one by one.
func (g *gatherer) collect(ctx context.Context, mine list) list {
	total := layoutOf(g.counts, g.displs)
	g.mine, g.all = mine, g.list(&g.recv, total)
	for r, n := range g.counts {
		g.lists[r] = g.all.part(g.displs[r], g.displs[r]+n)
	}
	g.fence(ctx)
	if g.err == nil && total > 0 {
		g.check(g.c.Group(g.submit))
	}
	g.join(ctx)
	return g.all
}

func (g *gatherer) submitLists() error {
	if err := g.submitWords(g.mine.idx, g.all.idx, dtype.I32); err != nil {
		return err
	}
	return g.submitWords(g.mine.val, g.all.val, dtype.F32)
}

func (g *gatherer) submitWords(send, recv uintptr, dt dtype.DType) error {
	if g.equal {
		return g.c.AllGather(send, recv, g.counts[0], dt)
	}
	return g.c.AllGatherV(send, recv, g.counts, g.displs, dt)
}

// collectPacked is collect with one message per rank, which holds its indices
// and behind them the bits of its values, as I32 words.
func (g *gatherer) collectPacked(ctx context.Context, mine list) {
	send := g.list(&g.packed, mine.n).idx
	g.copy(send, mine.idx, mine.n)
	g.copy(at(send, mine.n), mine.val, mine.n)
	for r := range g.counts {
		g.counts[r] *= 2
	}
	total := layoutOf(g.counts, g.displs)
	recv := g.list(&g.recv, (total+1)/2).idx
	for r := range g.lists {
		first, n := at(recv, g.displs[r]), g.counts[r]/2
		g.lists[r] = list{idx: first, val: at(first, n), n: n}
	}
	g.fence(ctx)
	if g.err == nil && total > 0 {
		g.check(g.c.AllGatherV(send, recv, g.counts, g.displs, dtype.I32))
	}
	g.join(ctx)
}

// gatherExchange gathers all picks everywhere, where they are added up.
type gatherExchange struct {
	*gatherer
	fixed  bool // all ranks pick equally many, so lengths need not travel
	packed bool // indices and values in one message
	again  bool // only the top k of the sum go into the result
	global listBuffer
}

func gatherAll(e *engine) exchange {
	return &gatherExchange{gatherer: newGatherer(e), fixed: true}
}

func gatherAgain(e *engine) exchange {
	return &gatherExchange{gatherer: newGatherer(e), fixed: true, again: true}
}

func gatherSized(e *engine) exchange { return &gatherExchange{gatherer: newGatherer(e)} }

func gatherPacked(e *engine) exchange {
	return &gatherExchange{gatherer: newGatherer(e), packed: true}
}

func (x *gatherExchange) run(ctx context.Context, picks list) int {
	if x.fixed {
		x.sameCounts(picks.n)
	} else {
		x.exchangeCounts(ctx, picks.n)
	}
	if x.packed {
		x.collectPacked(ctx, picks)
	} else {
		x.collect(ctx, picks)
	}
	x.zeroAt(x.residual, picks)
	total := 0
	for _, l := range x.lists {
		x.scale(l.val, l.n, x.average)
		x.scatterAdd(x.work, l)
		total += l.n
	}
	if !x.again {
		return total
	}
	// The sum is the same on every rank, and so are its largest entries.
	global, _ := x.topK(x.work, x.n, picks.n, x.list(&x.global, picks.n))
	for _, l := range x.lists {
		x.zeroAt(x.work, l)
	}
	x.giveBack(picks, global)
	x.scatterSet(x.work, global)
	return global.n
}

// sumExchange reduces the whole residual, densely, whatever was picked.
type sumExchange struct{ *engine }

func sumAll(e *engine) exchange { return sumExchange{e} }

func (x sumExchange) run(ctx context.Context, _ list) int {
	x.copy(x.work, x.residual, x.n)
	x.fill(x.residual, x.n)
	x.fence(ctx)
	if x.err == nil {
		x.check(x.c.AllReduce(x.work, x.work, x.n, dtype.F32, comm.Avg))
	}
	x.join(ctx)
	x.stats.PickedLocal = x.n
	return x.n
}

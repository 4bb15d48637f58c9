package engine

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// allgather collects a list of every rank on every rank.
type allgather struct {
	*engine
	lengths  []int            // of each rank's list, in entries
	displs   []int            // where each list begins among all of them, in entries
	spans    []int            // ranges of their indices, for messages without headers
	mail     mail             // in recv, or for collectInPlace
	recv     base.Buffer      // messages of all ranks; empty before the first
	joined   listBuffer       // the lists, unpacked
	words    int              // of a message of collectInPlace
	lists    []kernel.Entries // per rank, in rank order
	messages []uintptr        // for collectInPlace
}

func newAllgather(e *engine) *allgather {
	g := &allgather{
		engine:   e,
		lengths:  make([]int, e.size),
		displs:   make([]int, e.size),
		spans:    make([]int, e.size),
		mail:     newMail(e.size),
		lists:    make([]kernel.Entries, e.size),
		messages: make([]uintptr, e.size),
	}
	for r := range g.spans {
		g.spans[r] = e.n
	}
	return g
}

// collectInPlace is collect for messages of equal length that each rank has already placed
// ([allgatherExchange.placeSelected]). The compute stream does not wait yet, and nothing is unpacked.
func (g *allgather) collectInPlace(ctx context.Context) {
	if g.err != nil {
		return
	}
	g.pack(g.messages[g.rank], g.lists[g.rank], g.n)
	first := g.shared.Ptr
	if g.trims(g.words) {
		for r := range g.size {
			g.mail.rooms[r] = g.words
			g.mail.places[r] = r * g.words
		}
		g.gather(ctx, first)
		return
	}
	local := base.At(first, g.rank*g.words)
	g.add(comm.AllGatherCall(local, first, g.words, dtype.I32))
	g.submit(ctx)
}

// gather sends the messages of all ranks to every rank. This rank's message is already in place.
func (g *allgather) gather(ctx context.Context, place uintptr) {
	m := &g.mail
	m.ptr = place
	g.travel(func() {
		local := base.At(place, m.from[g.rank])
		g.communicate(ctx, comm.AllGatherVCall(local, place, m.sizes, m.from, dtype.I32))
	}, m)
}

// exchangeLengths sets g.lengths to the lengths of all ranks' lists, for which the host waits, and returns their sum.
// limit is the maximum length.
func (g *allgather) exchangeLengths(ctx context.Context, local kernel.Entries, limit func(rank int) int) int {
	g.communicate(ctx, comm.AllGatherCall(local.Len, g.address(g.received), 1, dtype.I32))
	g.read(ctx)
	for r, n := range g.checkWords(g.received, g.size, limit, "its number of entries") {
		g.lengths[r] = int(n)
	}
	return base.Displacements(g.lengths, g.displs)
}

// collect sends every rank's list to every rank, given the lengths in g.lengths. The result is the concatenation of
// the lists; g.lists has them one by one.
func (g *allgather) collect(ctx context.Context, local kernel.Entries) kernel.Entries {
	total := base.Displacements(g.lengths, g.displs)
	all := exactly(g.message(&g.joined, total), total)
	for r, n := range g.lengths {
		g.lists[r] = part(all, g.displs[r], g.displs[r]+n)
		g.mail.rooms[r] = g.messageWords(n, g.spans[r])
	}
	words := base.Displacements(g.mail.rooms, g.mail.places)
	g.allocate(&g.recv, (words+words/4)*base.WordSize)
	local = exactly(local, g.lengths[g.rank])
	g.pack(g.place(g.rank), local, g.spans[g.rank])
	g.gather(ctx, g.recv.Ptr)
	for r, l := range g.lists {
		g.unpack(l, g.place(r), g.spans[r])
	}
	return all
}

// place returns the address of a rank's message in recv.
func (g *allgather) place(rank int) uintptr {
	return base.At(g.recv.Ptr, g.mail.places[rank])
}

// collectSlots is collect for lists with lengths on the device, and room for those in g.lengths.
func (g *allgather) collectSlots(ctx context.Context, local kernel.Entries) []kernel.Entries {
	for r, n := range g.lengths {
		g.mail.rooms[r] = g.slotWords(n)
	}
	words := base.Displacements(g.mail.rooms, g.mail.places)
	g.allocate(&g.recv, words*base.WordSize)
	total := base.Displacements(g.lengths, g.displs)
	memory := g.listMemory(&g.joined.Buffer, total)
	for r, n := range g.lengths {
		entries := base.At(memory, 2*g.displs[r])
		g.placeSlots(g.lists[r:r+1], g.place(r), n, entries)
	}
	slot := g.lists[g.rank].Len
	g.pack(base.At(slot, headerWords), local, g.n)
	g.copy(slot, local.Len, 1)
	g.communicate(ctx, comm.AllGatherVCall(slot, g.recv.Ptr, g.mail.rooms, g.mail.places, dtype.I32))
	for _, l := range g.lists {
		g.unpackSlot(l)
	}
	return g.lists
}

// allgatherExchange sends all selected entries to all ranks, which add them up.
type allgatherExchange struct {
	*allgather
	fixed     bool // all ranks select the same number, so lengths are not sent
	reselects bool // only the top k of the sum are in the result
	sends     bool // ranks write their lists into each other's memory

	sum    listBuffer        // with reselects: the sum of all lists
	global listBuffer        // with reselects: its k largest entries
	top    [1]kernel.Entries // the list of the result
}

func allgatherEqual(e *engine) exchange {
	return &allgatherExchange{
		allgather: newAllgather(e),
		fixed:     true,
	}
}

func allgatherAgain(e *engine) exchange {
	return &allgatherExchange{
		allgather: newAllgather(e),
		fixed:     true,
		reselects: true,
	}
}

func allgatherSized(e *engine) exchange {
	return &allgatherExchange{allgather: newAllgather(e)}
}

// placeSelected puts the lists of all ranks into one array if they are sent at their capacity, in symmetric memory if
// there is any. Unknown lengths precede the lists.
func (x *allgatherExchange) placeSelected(ctx context.Context, n int) kernel.Entries {
	x.sends = x.shareLists(ctx, &x.peerLists[0], n)
	if x.sends {
		for r, l := range x.peerLists[0].Lists() {
			l.N = n
			if x.fixed {
				l = exactly(l, n)
			}
			x.lists[r] = l
		}
		return x.lists[x.rank]
	}
	if !x.fixed && x.order.Streams == nil {
		return x.engine.placeSelected(ctx, n)
	}
	x.words = x.slotWords(n)
	if x.fixed {
		x.words = x.messageWords(n, x.n)
	}
	x.share(ctx, x.words*x.size*base.WordSize)
	memory := x.listMemory(&x.joined.Buffer, x.size*n)
	if x.err != nil {
		return kernel.Entries{}
	}
	for r := range x.lists {
		place := base.At(x.shared.Ptr, r*x.words)
		entries := base.At(memory, 2*n*r)
		if x.fixed {
			x.lists[r] = x.listAt(place, n, entries)
			x.messages[r] = place
			continue
		}
		x.placeSlots(x.lists[r:r+1], place, n, entries)
		x.messages[r] = base.At(place, headerWords)
	}
	return x.lists[x.rank]
}

func (x *allgatherExchange) run(ctx context.Context, selected kernel.Entries) result {
	all := result{
		lists: x.lists,
		scale: x.average,
	}
	switch {
	case x.sends:
		x.gatherLists(ctx, &x.peerLists[0], selected)
	case x.fixed || x.order.Streams != nil:
		x.collectInPlace(ctx)
		all.messages = x.messages
	default:
		room := func(int) int { return selected.N } // all have room for the same number
		x.exchangeLengths(ctx, selected, room)
		x.collect(ctx, selected)
	}
	if !x.reselects {
		return all
	}
	x.arriveAll(ctx, all)
	// The sum is the same on every rank, and so are its largest entries. It has at least as many as were selected,
	// which is the same number on each rank.
	sum := x.message(&x.sum, min(selected.N*x.size, x.n))
	x.union(sum, x.lists, x.average, 0)
	x.top[0] = exactly(x.message(&x.global, selected.N), selected.N)
	x.topOf(sum, selected.N, x.top[0])
	x.restoreEntries(selected, x.top[0])
	return result{
		lists: x.top[:],
		scale: 1,
	}
}

// sumExchange reduces the whole residual, densely, whatever was selected.
type sumExchange struct{ *engine }

func sumAll(e *engine) exchange {
	if e.coded() {
		return &quantized{engine: e}
	}
	return sumExchange{e}
}

func (x sumExchange) run(ctx context.Context, _ kernel.Entries) result {
	sum := x.denseResult()
	x.copy(sum, x.residual, x.n)
	x.fill(x.residual, x.n)
	x.flagInput(sum, dtype.F32)
	x.communicate(ctx, comm.AllReduceCall(sum, sum, x.n, dtype.F32, comm.Avg))
	return result{
		dense: sum,
		scale: 1,
	}
}

package local

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/reductions"
)

// Small collectives, barriers and short allreduces, take no slot of the ring: what
// counts is how often a cache line goes from one core to another, 30 to 200 ns each.
// Through a slot, one after the other, it is the count of those that miss for each
// rank, the arguments, the data, the result and the number of those completed: each of
// these lines is written by all ranks in turn. Here a
// rank writes its own cell, which has all that the others have to know, data
// included, and reads theirs at the same time. (Floor: BenchmarkPingPong, a line there and one back.)
//
// Then each rank makes its own result, or, of longer data, a part of the result that the others copy.
// Of P ranks and L lines of data, each rank waits
//
//	whole   for one hand-over, and for (P-1)·L lines of data
//	parts   for two, and for (P-1)·L/P lines of data and as many of results
//
// where a hand-over is the time of P-1 lines that all others write, some 100 ns and 60 more for each rank, and
// lines of data that lie side by side take some 15 ns each, as several travel at once. So parts take less from
// L·(P-2) of about 50 lines on, which wholeTraffic says in bytes. Two ranks make the whole at any length.
//
// A rank tells a small collective when all before it are done for that rank, and
// submits nothing further before it has finished this one. So whoever reads a cell
// knows that all ranks have finished the last but one, whose cell it was before; and
// when all have come to a collective that takes a slot, everything before is done. A part is made when all have told
// the collective, and have finished the one before, so that nobody reads that one's parts any more.
//
// A small collective is complete when all ranks have told it: whoever does not find a part makes it. So nobody
// depends on ranks that compute, and all agree on what was completed when the world fails.

// isSmall reports whether a collective is one of these, as barriers and allreduces of up to smallBytes (plan.go) are.
// Ranks that agree on the call agree on that.
func (w *world) isSmall(x *entry) bool {
	if w.small == 0 || x.reduce == reductions.FixedPoint {
		return false
	}
	return x.op == comm.OpBarrier || x.op == comm.OpAllReduce && x.count <= w.small/x.dt.Size()
}

// skip accounts for the small collectives that rank 0 has finished since it was in
// the ring, for a slot counts on the end of the preceding collective: the slot of the
// first is as it should be before its next use, and the one of seq, the collective behind
// them, misses nothing but ranks. The caller holds e.mu.
func (e *endpoint) skip(seq uint64) {
	if e.rank == 0 && e.ringed < seq {
		e.world.slot(e.ringed).missing.Add(1)
		e.world.slot(seq).missing.Add(-1)
	}
	e.ringed = seq + 1
}

// tell submits a small collective. The caller holds e.mu, and calls
// driver.told without it.
func (e *endpoint) tell(x *entry) {
	seq := e.arrivals.Load()
	c := e.world.cell(seq, e.rank)
	c.entry = *x
	if bytes := x.count * x.dt.Size(); bytes > 0 {
		hostops.Copy(e.world.data(seq, bytes)[e.rank], x.send, bytes, false)
	}
	c.told.Store(seq + 1)
	e.arrivals.Store(seq + 1)
	e.finishSmall()
}

// data is where cells hold that many bytes, by rank.
func (w *world) data(seq uint64, bytes int) []uintptr {
	if bytes <= shortBytes {
		return w.told[seq%2].short
	}
	return w.told[seq%2].long
}

// finishSmall ends the small collective that the rank has told, if there is one, and
// reports whether there is none any more. The caller holds e.mu.
func (e *endpoint) finishSmall() bool {
	if !e.telling() {
		return true
	}
	w := e.world
	seq := e.arrivals.Load() - 1
	if e.quiet || !w.toldAll(seq) {
		return false
	}
	entry := &w.cell(seq, e.rank).entry
	for r := range w.ranks {
		if !entry.agrees(&w.cell(seq, r).entry) {
			e.judge()
			return false
		}
	}
	bytes := entry.count * entry.dt.Size()
	switch length := partLength(w.size, bytes); {
	case bytes == 0:
	case length == 0:
		e.results[0] = entry.recv
		hostops.Reduce(e.results[:1], w.data(seq, bytes), entry.count, entry.dt, entry.reduce, false)
	default:
		e.finishParts(entry, seq, length)
	}
	e.finished.Store(seq + 1)
	e.ownCell(seq+1, bytes)
	return true
}

// finishParts makes this rank's part of the result and takes the others'. A rank that has called and does not wait,
// or has no processor right now, makes none: whoever needs it makes it as well. The caller holds e.mu.
func (e *endpoint) finishParts(x *entry, seq uint64, length int) {
	w := e.world
	e.makePart(x, seq, e.rank, length, true)
	looks := partLooks(w.size, x.count*x.dt.Size())
	for i := 1; i < w.size; i++ {
		r := (e.rank + i) % w.size
		offset, count := partOf(x, r, length)
		if count == 0 {
			continue
		}
		p := &w.parts[r]
		for p.made.Load() != seq+1 && looks > 0 {
			looks--
		}
		if p.made.Load() != seq+1 {
			e.makePart(x, seq, r, length, false)
			continue
		}
		hostops.Copy(x.recv+offset, p.data, count*x.dt.Size(), false)
	}
}

// makePart makes a rank's part of the result, for this rank alone or for all of them.
func (e *endpoint) makePart(x *entry, seq uint64, rank, length int, publish bool) {
	offset, count := partOf(x, rank, length)
	if count == 0 {
		return
	}
	for r, data := range e.world.data(seq, x.count*x.dt.Size()) {
		e.sources[r] = data + offset
	}
	p := &e.world.parts[rank]
	e.results[0] = x.recv + offset
	results := e.results[:1]
	if publish {
		e.results[1] = p.data
		results = e.results[:2]
	}
	hostops.Reduce(results, e.sources, count, x.dt, x.reduce, false)
	if publish {
		p.made.Store(seq + 1)
	}
}

// partOf returns where a rank's part begins, in bytes, and how many elements it has.
func partOf(x *entry, rank, length int) (offset uintptr, count int) {
	size := x.dt.Size()
	begin := rank * length
	return uintptr(begin), max(min(length, x.count*size-begin), 0) / size
}

// ownCell has the rank's next cell come back from the processors that have read it, after a collective of that size in
// bytes: all ranks have read that cell, as they have told the one that this rank has finished.
func (e *endpoint) ownCell(seq uint64, bytes int) {
	data := e.world.data(seq, bytes)[e.rank]
	if bytes <= shortBytes {
		hostmem.Own(data)
		return
	}
	for offset := 0; offset < min(bytes, ownedBytes); offset += lineBytes {
		hostmem.Own(data + uintptr(offset))
	}
}

// judge aborts the world if all ranks have come to this one's oldest collective, as
// something else. Collectives that take a slot are compared by who starts them, which
// does not happen if for one of the ranks it is a small one. The caller holds e.mu,
// so that no rank goes past that collective.
func (e *endpoint) judge() {
	w := e.world
	if w.small == 0 {
		return
	}
	seq := e.completed()
	if e.telling() {
		seq = e.arrivals.Load() - 1
	}
	small := false
	for r, peer := range w.ranks {
		if peer.arrivals.Load() <= seq {
			return
		}
		small = small || w.cell(seq, r).told.Load() == seq+1
	}
	if !small {
		return
	}
	w.judging.Lock()
	defer w.judging.Unlock()
	s := w.slot(seq)
	for r := range w.ranks {
		if c := w.cell(seq, r); c.told.Load() == seq+1 {
			s.calls[r] = c.entry
		}
	}
	if err := w.agree(s, seq); err != nil {
		w.fail(&failure{rank: everyone, culprit: err, peers: err})
	}
}

// told goes on after a small collective was told: with those who can finish it, or
// who sleep while it was finished for them.
func (d *driver) told() {
	w := d.world
	w.wake(-1, func(e *endpoint) bool { return e.mayFinish() || e.done() })
	d.kickStalled()
	if w.left.Load() > 0 {
		w.checkLeft()
	}
}

// kickStalled has the endpoints look at their backlogs that wait for a collective.
func (d *driver) kickStalled() {
	if d.world.stalled.Load() == 0 {
		return
	}
	for _, e := range d.world.ranks {
		if e.stalled.Load() {
			d.kick(e)
		}
	}
}

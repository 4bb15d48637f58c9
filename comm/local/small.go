package local

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
)

// Small collectives, barriers and short allreduces, take no slot of the ring: what
// counts is how often a cache line goes from one core to another, 30 to 100 ns each.
// Through a slot, one after the other, it is the count of those that miss for each
// rank, the arguments, the data, the result and the number of those completed. Here a
// rank writes a cell of its own, which has all that the others have to know, data
// included, reads theirs, and makes its own result: a line from each rank to each
// other, at the same time. (Floor: BenchmarkPingPong, a line there and one back.)
//
// A rank tells a small collective when all before it are done for that rank, and
// submits nothing further before it has finished this one. So whoever reads a cell
// knows that all ranks have finished the last but one, whose cell it was before; and
// when all have come to a collective that takes a slot, everything before is done.

// small reports whether a collective is one of these, on which ranks that agree on
// the call agree.
func (w *world) small(x *entry) bool {
	if !w.tells {
		return false
	}
	return x.op == comm.OpBarrier || x.op == comm.OpAllReduce && x.count <= smallBytes/x.dt.Size()
}

// skip accounts for the small collectives that rank 0 has finished since it was in
// the ring, for a slot counts on the end of the preceding collective: the slot of the
// first is as it should be before its next use, and that of seq, the collective behind
// them, misses nothing but ranks. The caller holds e.mu.
func (e *endpoint) skip(seq uint64) {
	if e.rank == 0 && e.ringed < seq {
		e.world.slot(e.ringed).missing.Add(1)
		e.world.slot(seq).missing.Add(-1)
	}
	e.ringed = seq + 1
}

// tell submits a small collective. The caller holds e.mu, and calls driver.told
// without it.
func (e *endpoint) tell(x *entry) {
	seq := e.arrivals.Load()
	c := e.world.cell(seq, e.rank)
	c.entry = *x
	if x.count > 0 {
		copy(c.data[:], hostmem.Slice[byte](x.send, x.count*x.dt.Size()))
	}
	c.told.Store(seq + 1)
	e.arrivals.Store(seq + 1)
	e.finishSmall()
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
	if entry.count > 0 {
		e.result[0] = entry.recv
		hostops.Reduce(
			e.result[:],
			w.told[seq%2],
			entry.count,
			entry.dt,
			entry.reduce,
			false,
		)
	}
	e.finished.Store(seq + 1)
	hostmem.Own(w.told[(seq+1)%2][e.rank] + ownedByte(entry.count*entry.dt.Size()))
	return true
}

// ownedByte returns which byte of a cell's data is in the line that a rank has come back
// after data of so many bytes, see firstBytes.
func ownedByte(bytes int) uintptr {
	if bytes > firstBytes {
		return smallBytes - 1
	}
	return 0
}

// judge aborts the world if all ranks have come to this one's oldest collective, as
// something else. Collectives that take a slot are compared by who starts them, which
// does not happen if for one of the ranks it is a small one. The caller holds e.mu,
// so that no rank goes past that collective.
func (e *endpoint) judge() {
	w := e.world
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
			s.extras[r].set(&comm.Call{}, nil)
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

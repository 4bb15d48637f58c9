package local

import "github.com/tutti-go/tutti/comm"

// driver carries out what one event (a submission, the end of an operation)
// makes possible, one thing after the other instead of one inside the other.
type driver struct {
	*endpoint // on whose time this happens
	// kicked lists endpoints whose backlog may go on, linked by endpoint.next.
	kicked *endpoint
	// ready says that the collective number seq can start. There is at most
	// one such, since each one waits for its predecessor.
	ready bool
	seq   uint64
}

// run goes on until nothing is left to do.
func (d *driver) run() {
	for {
		switch {
		case d.ready:
			d.ready = false
			d.start(d.seq)
		case d.kicked != nil:
			e := d.kicked
			d.kicked = e.next
			e.linked.Store(false) // from here on, others may kick it again
			d.pump(e)
		default:
			return
		}
	}
}

// kick puts an endpoint on the list, unless it is on somebody's.
func (d *driver) kick(e *endpoint) {
	if e.linked.CompareAndSwap(false, true) {
		e.next = d.kicked
		d.kicked = e
	}
}

// arrived counts down what a collective waits for: a rank, its predecessor.
func (d *driver) arrived(seq uint64) {
	if d.world.slot(seq).missing.Add(-1) == 0 {
		d.ready, d.seq = true, seq
	}
}

// start runs a collective that all ranks have submitted, or lets them run it.
func (d *driver) start(seq uint64) {
	w, s := d.world, d.world.slot(seq)
	if w.failure.Load() != nil {
		s.missing.Store(abandoned)
		return
	}
	if err := w.agree(s); err != nil {
		w.fail(&failure{rank: everyone, own: err, peers: err})
		s.missing.Store(abandoned)
		return
	}
	switch s.calls[0].op {
	case comm.OpBarrier:
	case comm.OpSplit:
		w.split(s)
	default:
		s.prepare(w.workers)
		chunks := s.plan.chunks
		if chunks > 1 {
			s.left.Store(int32(chunks))
			w.front.claim.offer(seq, chunks) // from here on, the slot may be used anew at any time
			w.wakeHelpers(chunks, anyone)
			return
		}
		if chunks == 1 {
			scratch := d.takeScratch()
			s.execute(0, scratch)
			d.returnScratch(scratch)
		}
	}
	d.finish(seq, s)
}

// finish hands a collective that is done back to its ranks, and its slot to
// the collective that comes one round later.
func (d *driver) finish(seq uint64, s *slot) {
	w := d.world
	s.missing.Store(int32(w.size) + 1)
	w.front.completed.Store(seq + 1)
	w.wakeDone()
	if w.stalled.Load() > 0 {
		for _, e := range w.ranks {
			if e.stalled.Load() {
				d.kick(e)
			}
		}
	}
	d.arrived(seq + 1)
}

// arrive is arrived for a rank, not a predecessor: it may turn out to be in
// vain.
func (d *driver) arrive(seq uint64) {
	d.arrived(seq)
	if d.world.left.Load() > 0 {
		d.world.checkLeft()
	}
}

// pump starts what it can of an endpoint's backlog.
func (d *driver) pump(e *endpoint) {
	for d.world.failure.Load() == nil {
		e.mu.Lock()
		if !e.advanceable() {
			e.mu.Unlock()
			return
		}
		o := e.backlog.pop()
		if o.op.Message() {
			e.open = append(e.open, o)
			match := e.post(o)
			e.mu.Unlock()
			d.posted(o, match)
			continue
		}
		seq := e.arrivals.Load()
		s := e.world.slot(seq)
		s.calls[e.rank] = o.entry
		x := &s.extras[e.rank]
		x.ints, o.ints = o.ints, x.ints
		x.split = o.split
		e.arrivals.Store(seq + 1)
		e.pending.Add(-1)
		e.recycle(o)
		e.mu.Unlock()
		d.arrive(seq)
	}
}

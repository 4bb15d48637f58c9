package local

import (
	"runtime"
	"slices"

	"github.com/tutti-go/tutti/comm"
)

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

// start runs a collective that all ranks have submitted, or lets them run it.
func (d *driver) start(seq uint64) {
	w := d.world
	s := d.world.slot(seq)
	if w.failure.Load() != nil {
		s.missing.Store(abandoned)
		return
	}
	if err := w.agree(s, seq); err != nil {
		w.fail(&failure{rank: everyone, culprit: err, peers: err})
		s.missing.Store(abandoned)
		return
	}
	switch s.calls[0].op {
	case comm.OpBarrier:
	case comm.OpSplit:
		w.split(s)
	default:
		s.prepare(w)
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
	s.forgetSums(w.ranks)
	// In this order: in between, drain still takes the collective for running, so that no rank reports
	// as lost what others see completed. Nobody enters the slot again before the next one is completed.
	w.front.completed.Store(seq + 1)
	s.missing.Store(int32(w.size) + 1)
	w.wakeDone()
	d.kickStalled()
	d.arrived(seq + 1)
}

// pump starts what it can of an endpoint's backlog.
func (d *driver) pump(e *endpoint) {
	for {
		e.mu.Lock()
		// Once a rank knows that the world broke, and has had this lock, nobody else
		// touches its buffers.
		if d.world.failure.Load() != nil || !e.advanceable() {
			e.mu.Unlock()
			return
		}
		o := e.backlog.Pop()
		if o.op.Message() {
			e.open(o)
			match := e.post(o)
			e.mu.Unlock()
			d.posted(o, match)
			continue
		}
		if e.world.isSmall(&o.entry) {
			e.tell(&o.entry)
			e.pending.Add(-1)
			e.recycle(o)
			e.mu.Unlock()
			d.told()
			continue
		}
		seq, s := e.enter(&o.entry)
		x := &s.extras[e.rank]
		x.lists, o.lists = o.lists, x.lists
		x.split = o.split
		x.sums = o.sums
		e.arrivals.Store(seq + 1)
		e.pending.Add(-1)
		e.recycle(o)
		e.mu.Unlock()
		d.arrive(seq)
	}
}

// finishTold ends the rank's small collective, if that can be, and starts what waits for
// that. Other waits of the rank were woken by the rank that told it last.
func (e *endpoint) finishTold() bool {
	if !e.mayFinish() {
		return false
	}
	e.mu.Lock()
	done := e.finishSmall()
	goesOn := !e.backlog.Empty()
	e.mu.Unlock()
	if goesOn {
		d := driver{endpoint: e}
		d.kick(e)
		d.run()
	}
	return done
}

// ranges returns in how many ranges of chunks a rank looks for one. One of two ranks leaves the other's to it at first:
// whoever reads where a peer takes its chunks has that peer wait for the cache line when it takes the next one. More
// ranks do not come at the same time: it pays that those who are early take the chunks of those who are late.
func (w *world) ranges(s *spell) int {
	if w.workers == 2 && s.early() {
		return 1
	}
	return w.workers
}

// help does one piece of work that is waiting for somebody, if there is any.
func (e *endpoint) help(s *spell) bool {
	w := e.world
	last := w.front.claim.last()
	if e.exhausted.Load() != uint64(last) {
		ranges := w.ranges(s)
		if ranges > 1 || s.vain != last {
			chunk, ok := w.front.claim.take(last, e.rank, ranges)
			if ok {
				e.helpCollective(w.slot(last.seq()), chunk)
				return true
			}
			s.vain = last
		}
		if ranges == w.workers {
			e.exhausted.Store(uint64(last))
		}
	}
	return w.front.jobs.Load() > 0 && e.helpMessage()
}

func (e *endpoint) helpCollective(s *slot, chunk int) {
	scratch := e.takeScratch()
	s.execute(chunk, scratch)
	e.returnScratch(scratch)
	if s.left.Add(-1) == 0 {
		d := driver{endpoint: e}
		d.finish(e.world.front.completed.Load(), s)
		d.run()
	}
}

// helpMessage copies one chunk of a message.
func (e *endpoint) helpMessage() bool {
	w := e.world
	w.jobs.mu.Lock()
	if len(w.jobs.list) == 0 {
		w.jobs.mu.Unlock()
		return false
	}
	o := w.jobs.list[0]
	chunk := o.next
	o.next++
	if o.next == o.chunks {
		w.jobs.list = slices.Delete(w.jobs.list, 0, 1)
		w.front.jobs.Add(-1)
	}
	w.jobs.mu.Unlock()
	d := driver{endpoint: e}
	d.copyChunk(o, chunk)
	d.run()
	return true
}

// drain returns once nobody touches buffers of this aborted world, and nobody
// will: what runs is finished, nothing else is started.
func (e *endpoint) drain() {
	w := e.world
	e.mu.Lock() // who moves data for this rank's small collectives holds it
	e.quiet = true
	e.mu.Unlock()
	for {
		running := w.slot(w.front.completed.Load()).missing.Load() == 0
		if !running && w.copying.Load() == 0 {
			return
		}
		if !running || !e.help(&spell{}) {
			runtime.Gosched()
		}
	}
}

package record

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/callers"
)

// progress is what a [Recorder] learns from its communicator ([comm.Progresser]) between
// waits. The communicator counts the calls of one kind as the Recorder does, and in the
// same order, except those that goroutines make at the same time. The Recorder's lock
// guards it.
type progress struct {
	of        comm.Progresser // nil if the communicator is none
	base      [2]uint64       // collectives and messages before the first recorded one
	next      [2]uint64       // the first call that may not be marked as done, by kind
	goroutine uintptr         // that made the last call
}

func newProgress(c comm.Communicator) (p progress) {
	if p.of, _ = comm.As[comm.Progresser](c); p.of != nil {
		now := p.of.Progress()
		p.base = [2]uint64{now.Collectives.Submitted, now.Messages.Submitted}
	}
	return p
}

// done returns how many collectives and messages are done.
func (p *progress) done() (done [2]uint64) {
	if p.of != nil {
		now := p.of.Progress()
		done = [2]uint64{now.Collectives.Done, now.Messages.Done}
	}
	return done
}

// lookEvery is the number of calls between two looks at the progress, each of which costs
// some nanoseconds.
const lookEvery = 8

// handOver notes that call id comes from another goroutine than the call before, which may
// still be in flight, so that either may be submitted first. A goroutine that has made two
// calls has submitted the first of them.
func (r *Recorder) handOver(id uint64, to uintptr) {
	r.progress.goroutine = to
	if id > 0 {
		r.at(id).shared = true
		if before := r.at(id - 1); before != nil {
			before.shared = true
		}
	}
}

// markDone marks the first done collectives and messages. Barrier and Split mark themselves.
func (r *Recorder) markDone(done [2]uint64, now callers.Ticks) {
	oldest := r.calls - min(r.calls, uint64(len(r.ring)))
	for kind := range done {
		next := &r.progress.next[kind]
		for *next = max(*next, oldest); *next < r.calls; *next++ {
			e := r.at(*next)
			number, last := &e.number.collective, &r.last.collective
			if e.op.Message() {
				number, last = &e.number.message, &r.last.message
			}
			if e.op.Message() != (kind == 1) || !e.op.MovesData() || e.err != nil || e.done > 0 || e.shared {
				continue
			}
			if r.progress.base[kind]+*number > done[kind] {
				break
			}
			e.done, *last = now, *number
		}
	}
}

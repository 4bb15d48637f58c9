package record

import (
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// progress is what a [Recorder] learns from its communicator ([backend.Progresser]) between
// waits. The communicator counts the calls of one kind as the Recorder does, and in the
// same order, except those that goroutines make at the same time. The Recorder's lock
// guards it.
type progress struct {
	source     backend.Progresser // nil if the communicator is none
	base       [2]uint64          // collectives and messages before the first recorded one
	next       [2]uint64          // the first call that may not be marked as done, by kind
	submitting [2]int             // calls that are recorded and whose submission has not returned, by kind
}

func newProgress(c comm.Communicator) (p progress) {
	p.source, _ = comm.As[backend.Progresser](c)
	if p.source != nil {
		now := p.source.Progress()
		p.base = [2]uint64{now.Collectives.Submitted, now.Messages.Submitted}
	}
	return p
}

// done returns how many collectives and messages are done.
func (p *progress) done() (done [2]uint64) {
	if p.source != nil {
		now := p.source.Progress()
		done = [2]uint64{now.Collectives.Done, now.Messages.Done}
	}
	return done
}

// lookEvery is the number of calls between two looks at the progress, each of which costs
// some nanoseconds.
const lookEvery = 8

// kind returns the index of a call's kind: 0 for collectives, 1 for messages.
func kind(op comm.Op) int {
	if op.Message() {
		return 1
	}
	return 0
}

// overlap notes that call id is recorded while another goroutine submits the call of its kind before
// it, so that either may be submitted first. Of three at a time the first two are noted already.
func (r *Recorder) overlap(id uint64) {
	e := r.lookup(id)
	e.shared = true
	for id > 0 {
		id--
		previous := r.lookup(id)
		if previous == nil {
			return
		}
		if kind(previous.op) == kind(e.op) {
			previous.shared = true
			return
		}
	}
}

// markDone marks the first done collectives and messages. Barrier and Split mark themselves.
func (r *Recorder) markDone(done [2]uint64, now time.Time) {
	oldest := r.calls - min(r.calls, uint64(len(r.ring)))
	for k := range done {
		next := &r.progress.next[k]
		for *next = max(*next, oldest); *next < r.calls; *next++ {
			e := r.lookup(*next)
			number := &e.number.collective
			last := &r.last.collective
			if e.op.Message() {
				number = &e.number.message
				last = &r.last.message
			}
			if kind(e.op) != k || !e.op.MovesData() || e.err != nil || !e.done.IsZero() || e.shared {
				continue
			}
			if r.progress.base[k]+*number > done[k] {
				break
			}
			e.done = now
			*last = *number
		}
	}
}

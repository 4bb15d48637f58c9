package comm

import "github.com/tutti-go/tutti/internal/callers"

// told is what a [Recorder] knows of calls by its communicator ([Progresser]), beside
// what waits tell. Calls of one kind are as many there as here, in the same order, but
// for those that goroutines make at the same time. The Recorder's lock guards it.
type told struct {
	by        Progresser // nil if it does not tell
	base      [2]uint64  // how many collectives and messages there were before
	next      [2]uint64  // calls of that kind before this one were looked at
	goroutine uintptr    // that made the last call
}

func newTold(c Communicator) (t told) {
	if t.by, _ = As[Progresser](c); t.by != nil {
		p := t.by.Progress()
		t.base = [2]uint64{p.Collectives.Submitted, p.Messages.Submitted}
	}
	return t
}

// look returns how many collectives and messages are done.
func (t *told) look() (done [2]uint64) {
	if t.by != nil {
		p := t.by.Progress()
		done = [2]uint64{p.Collectives.Done, p.Messages.Done}
	}
	return done
}

// lookEvery is after how many calls a Recorder looks, which costs some nanoseconds.
const lookEvery = 8

// handOver notes that call id comes from another goroutine than the one before, which
// may be under way: which of them is submitted first is not known. A goroutine that has
// made two calls, one after the other, has submitted the first.
func (r *Recorder) handOver(id uint64, to uintptr) {
	r.told.goroutine = to
	if id > 0 {
		r.at(id).shared = true
		if before := r.at(id - 1); before != nil {
			before.shared = true
		}
	}
}

// settle marks the calls as done that are among so many. Those that wait say themselves
// when they are.
func (r *Recorder) settle(done [2]uint64, now callers.Ticks) {
	oldest := r.calls - min(r.calls, uint64(len(r.ring)))
	for kind := range done {
		next := &r.told.next[kind]
		for *next = max(*next, oldest); *next < r.calls; *next++ {
			e := r.at(*next)
			number, last := &e.number.collective, &r.last.collective
			if e.op.Message() {
				number, last = &e.number.message, &r.last.message
			}
			if e.op.Message() != (kind == 1) || !e.op.MovesData() || e.err != nil || e.done > 0 || e.shared {
				continue
			}
			if r.told.base[kind]+*number > done[kind] {
				break
			}
			e.done, *last = now, *number
		}
	}
}

package schedule

import (
	"github.com/tutti-go/tutti/internal/queue"
	"github.com/tutti-go/tutti/internal/spans"
)

// operations are submitted operations that have not started, in order.
type operations struct {
	all         queue.Of[*Op] // collectives and messages
	collectives queue.Of[*Op] // the collectives among them
}

func (q *operations) push(o *Op) {
	q.all.Push(o)
	if o.collective() {
		q.collectives.Push(o)
	}
}

func (q *operations) pop() *Op {
	o := q.all.Pop()
	if o.collective() {
		q.collectives.Pop()
	}
	return o
}

// usage is the memory of operations that have started.
type usage struct {
	reads, writes spans.Set[*Op] // ranges that are read, and those that are written
}

// add adds the memory of an operation that starts.
func (u *usage) add(o *Op) {
	if s := o.reads; s.from < s.to {
		o.reading = u.reads.Insert(s.from, s.to, o)
	}
	if s := o.writes; s.from < s.to {
		o.writing = u.writes.Insert(s.from, s.to, o)
	}
}

// remove removes the memory of an operation that is done.
func (u *usage) remove(o *Op) {
	if o.reading != 0 {
		u.reads.Remove(o.reading)
		o.reading = 0
	}
	if o.writing != 0 {
		u.writes.Remove(o.writing)
		o.writing = 0
	}
}

// conflicts reports whether o has to wait for an operation that has started: one of them writes memory that the other
// uses, and they are not concurrent parts of a group.
func (u *usage) conflicts(o *Op) bool {
	ordered := func(earlier *Op) bool {
		return o.chained || o.group != earlier.group
	}
	r := o.reads
	w := o.writes
	return u.writes.Overlaps(r.from, r.to, ordered) ||
		u.writes.Overlaps(w.from, w.to, ordered) ||
		u.reads.Overlaps(w.from, w.to, ordered)
}

package noop

import "github.com/tutti-go/tutti/comm"

// waiting is the calls that wait: messages for their partners, and collectives for messages before them. The zero
// value is empty.
type waiting struct {
	root deferred  // of a ring in the order of submission; its links are nil before the first push
	idle *deferred // for reuse, linked by next; nil for none
}

// deferred is a call that waits.
type deferred struct {
	comm.Call
	previous, next *deferred // neighbours in the list; nil at its ends
}

// first returns the oldest call, nil if there is none.
func (w *waiting) first() *deferred {
	return w.after(&w.root)
}

// after returns the next call, nil behind the last.
func (w *waiting) after(d *deferred) *deferred {
	if d.next == &w.root {
		return nil
	}
	return d.next
}

// push adds a call behind the others.
func (w *waiting) push(call comm.Call) *deferred {
	if w.root.next == nil {
		w.clear()
	}
	d := w.idle
	if d == nil {
		d = new(deferred)
	} else {
		w.idle = d.next
	}
	d.Call = call
	d.previous = w.root.previous
	d.next = &w.root
	d.previous.next = d
	w.root.previous = d
	return d
}

// remove removes a call, which is used again.
func (w *waiting) remove(d *deferred) {
	d.previous.next = d.next
	d.next.previous = d.previous
	*d = deferred{next: w.idle}
	w.idle = d
}

// clear removes all calls.
func (w *waiting) clear() {
	w.root.next = &w.root
	w.root.previous = &w.root
}

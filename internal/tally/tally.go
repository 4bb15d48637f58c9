// Package tally counts operations that end in any order.
package tally

import "sync/atomic"

// Tally counts operations that have begun, and the leading ones of these that have ended. Begin and End are called
// under a lock of the owner; the other methods may be called at any time. The zero value is ready.
type Tally struct {
	begun, ended atomic.Uint64 // operations begun, and leading operations ended
	late         []bool        // of the operations from ended on, which have ended
}

// Begin returns the number of an operation, from 0.
func (t *Tally) Begin() uint64 {
	n := t.begun.Load()
	t.begun.Store(n + 1)
	return n
}

// End ends an operation.
func (t *Tally) End(number uint64) {
	first := t.ended.Load()
	for index := int(number - first); index >= len(t.late); {
		t.late = append(t.late, false)
	}
	t.late[number-first] = true
	n := 0
	for n < len(t.late) && t.late[n] {
		n++
	}
	if n > 0 {
		t.late = t.late[:copy(t.late, t.late[n:])]
		t.ended.Store(first + uint64(n))
	}
}

// Begun returns the number of operations that have begun.
func (t *Tally) Begun() uint64 {
	return t.begun.Load()
}

// Ended returns the number of leading operations that have ended.
func (t *Tally) Ended() uint64 {
	return t.ended.Load()
}

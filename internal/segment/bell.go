package segment

import (
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// Bell wakes up a process that sleeps until others have something for it. Its word is in the segment. A process arms
// its bell, looks once more, and sleeps. The others write what they have, and ring: that costs them a look at the word
// unless the bell is armed.
type Bell struct{ word *atomic.Uint32 }

// BellBytes is the memory of a bell, which no other data shares a pair of cache lines with.
const BellBytes = 128

// States of a bell.
const (
	quiet = iota
	armed
)

// NewBell returns the bell whose word is at an address in a segment.
func NewBell(address uintptr) Bell {
	return Bell{&hostmem.Slice[atomic.Uint32](address, 1)[0]}
}

// Arm arms the bell. Earlier rings had no effect.
func (b Bell) Arm() {
	if !b.Armed() {
		b.word.Store(armed)
	}
}

// Armed reports whether the bell is armed.
func (b Bell) Armed() bool { return b.word.Load() == armed }

// Mute has nobody ring the bell: its process looks by itself. It wakes up those of the process that sleep, as nobody
// else will.
func (b Bell) Mute() { b.Ring() }

// Ring wakes up the process whose bell it is, if that is armed.
func (b Bell) Ring() {
	if b.word.Load() != quiet && b.word.Swap(quiet) != quiet {
		b.wake()
	}
}

// Rouse wakes up whoever sleeps, also if a process has ended between the two halves of Ring.
func (b Bell) Rouse() {
	b.word.Store(quiet)
	b.wake()
}

// Sleep blocks a thread until the bell rings. It returns at once if that is not armed, and may return early.
func (b Bell) Sleep() { b.sleep() }

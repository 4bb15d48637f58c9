package segment

import (
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// Bell wakes a process that sleeps until others have data for it. Its word is in the segment. A process arms its bell,
// polls once more, and sleeps. The others write their data and ring, which only reads the word unless the bell is
// armed.
type Bell struct{ word *atomic.Uint32 }

// BellBytes is the size of a bell, including padding: no other data shares its pair of cache lines.
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

// Mute keeps others from ringing the bell, because its process polls. It wakes the process's sleeping threads, as
// nobody else will.
func (b Bell) Mute() { b.Ring() }

// Ring wakes the process of the bell, if the bell is armed.
func (b Bell) Ring() {
	if b.word.Load() != quiet && b.word.Swap(quiet) != quiet {
		b.wake()
	}
}

// Rouse wakes all sleepers, even if a process ended between the two halves of Ring.
func (b Bell) Rouse() {
	b.word.Store(quiet)
	b.wake()
}

// Sleep blocks a thread until the bell rings. It returns at once if the bell is not armed, and may return early.
func (b Bell) Sleep() { b.sleep() }

package poll

import (
	"sync"
	"time"
)

// Home is the processor of a rank on a host whose ranks take most of the processors. The kernel may put two ranks on
// one processor, because another thread has run for a moment, and leaves them there for milliseconds: it does not know
// that ranks only wait, so the other processors are no less busy to it. All ranks then wait for these two. A wait that
// notices that it shares its processor therefore returns to the rank's own. It is not bound to it: the rank's threads
// may use all processors.
type Home struct {
	rank  int // among the ranks of the host
	ranks int // of the host

	mu        sync.Mutex    // guards the fields below
	current   uint32        // the processor that the system has named last
	shared    int           // yields since sharing in which others ran; 0 before the first
	sharing   time.Time     // the first of them; zero before it
	freeAgain time.Time     // when the rank may return, as somebody computes at home; zero if nobody has
	absence   time.Duration // the last one; 0 before it
}

// NewHome returns the home of a rank among the ranks of its host.
func NewHome(rank, ranks int) *Home { return &Home{rank: rank, ranks: ranks} }

const (
	// sharedYield is how long a yield takes if somebody else runs meanwhile. Others take less than a microsecond.
	sharedYield = 10 * time.Microsecond
	// A processor is shared if manyShared yields within sharedTime take that long. One alone may be an interrupt.
	manyShared = 3
	sharedTime = time.Millisecond
	// takenYield is how long a yield takes if somebody else computes. Ranks that wait return the processor sooner.
	takenYield = time.Millisecond
	// A rank whose processor is taken stays away for shortAbsence, and twice as long each time that it comes back to a
	// taken one, up to longAbsence. Each return costs a slice of time, some milliseconds.
	shortAbsence = 100 * time.Millisecond
	longAbsence  = 10 * time.Second
)

// stay is the choice of a wait that does not move.
const stay = -1

// choose returns the processor to which a wait moves after a yield of at least sharedYield, by its place among those
// that the thread may use, or stay. current is the place of the one that it is on. The caller holds mu.
func (h *Home) choose(length time.Duration, now time.Time, current, usable int) int {
	switch {
	case h.ranks > usable:
		return stay // ranks share processors anyway, or each is bound to some
	case 2*h.ranks <= usable:
		return stay // the kernel finds a free one for each, and another job may have the same homes
	case length >= takenYield:
		// Beside another rank a wait takes microseconds, beside somebody who computes slices of milliseconds.
		h.leave(now)
		return (current + 1) % usable
	case now.Before(h.freeAgain):
		return stay
	case !h.crowded(now) || current == h.rank:
		return stay
	}
	return h.rank
}

// leave notes that somebody computes where the rank is, at home or where it has gone instead.
func (h *Home) leave(now time.Time) {
	if now.Before(h.freeAgain) {
		return
	}
	if now.Sub(h.freeAgain) < h.absence {
		h.absence = min(2*h.absence, longAbsence)
	} else {
		h.absence = shortAbsence
	}
	h.freeAgain = now.Add(h.absence)
}

// crowded counts a yield in which others ran, and reports whether there are many.
func (h *Home) crowded(now time.Time) bool {
	if now.Sub(h.sharing) > sharedTime {
		h.sharing = now
		h.shared = 0
	}
	h.shared++
	return h.shared >= manyShared
}

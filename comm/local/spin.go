package local

import (
	"sync/atomic"
	"time"
)

// minSpin and maxSpin bound how long a rank looks for an end of its waiting before
// it yields its processor, in worlds that have a processor per rank: more than the
// peers take for a small collective if they come at the same time, to more than it
// takes to wake sleeping threads one after the other, or than the chunk that another rank is doing.
const minSpin, maxSpin = time.Microsecond, 128 * time.Microsecond

// yieldLooks is how often a rank looks for an end of its waiting after it has spun,
// letting other goroutines run in between, before it sleeps.
const yieldLooks = 16

// looksBetween is how often it looks before it lets others run once more. Ranks that share its processor have had their
// turn by then, so that it waits for another processor, and letting them run takes a lock of the scheduler that this
// one needs as well.
const looksBetween = 16

// clockLooks is how often it looks between two looks at the clock, which take longer.
const clockLooks = 16

// lookTime bounds spinning by looks as well as by the clock, which stands still in a bubble of
// testing/synctest as long as a rank runs. A look takes longer, so that elsewhere the clock
// comes first.
const lookTime = 5 * time.Nanosecond

// start is when the clock of waits was 0.
var start = time.Now()

// clock is one reading of a clock, where [time.Now] is two.
func clock() time.Duration { return time.Since(start) }

// habit is how the waits of a rank spin, in nanoseconds. It follows how they ended. Several goroutines may use it.
type habit struct {
	slice atomic.Int64 // before goroutines that share the processor run; from there on after twice the time
	total atomic.Int64 // before the rank stops spinning; 0: it does not spin
}

// begin begins a wait.
func (h *habit) begin() spell {
	total := time.Duration(h.total.Load())
	if total == 0 {
		return spell{left: 1}
	}
	return spell{spinning: true, left: clockLooks, slice: time.Duration(h.slice.Load()), total: total}
}

// learn takes account of a wait that has ended.
func (h *habit) learn(s *spell) {
	total := time.Duration(h.total.Load())
	if total == 0 || !s.looked || s.clocks == 0 && !s.spinning {
		return
	}
	waited := s.last - s.began
	slice := time.Duration(h.slice.Load())
	switch {
	case s.yielded:
		// The peers were waiting for this very processor, which may be all that a busy machine leaves to the ranks.
		slice = max(slice/2, minSpin)
	case s.spinning && waited > slice/2:
		slice = min(2*slice, maxSpin)
	case s.spinning:
		// Little by little: in turn with short waits there may be long ones, as for another rank's chunk, and a rank that
		// yields on an idle machine is moved to another thread while the others wait for it.
		slice = max(slice-slice/8, 2*waited, minSpin)
	}
	if s.slice != slice {
		h.slice.Store(int64(slice))
	}
	// A wait that was put to sleep counts by its time. Ranks that spin for less than their peers take to wake up
	// would otherwise put each other to sleep for good.
	switch {
	case waited > maxSpin:
		h.total.Store(int64(max(total/2, minSpin)))
	case total < maxSpin:
		h.total.Store(int64(min(2*total, maxSpin)))
	}
}

// spell is a wait, until it ends or there is something to do.
type spell struct {
	spinning bool          // not yet for total
	looked   bool          // in vain, once at least
	yielded  bool          // others have run on the processor since the last look
	left     int           // looks before the next pause, or the next look at the clock
	slice    time.Duration // of spinning before others run
	total    time.Duration // of spinning
	clocks   int           // looks at the clock
	yields   int           // after spinning
	vain     offer         // the last one of which the rank's range had no chunks left; 0 before
	began    time.Duration // the clock at the first look at it; 0 before
	last     time.Duration // at the last one; 0 before
}

// step is what a wait does next.
type step uint8

const (
	lookAgain step = iota
	letOthersRun
	goToSleep
)

// next returns what to do after a look in vain.
func (s *spell) next(clock func() time.Duration) step {
	s.looked = true
	s.yielded = false
	if s.left--; s.left > 0 {
		return lookAgain
	}
	return s.pause(clock)
}

// pause is next after looks without a pause.
func (s *spell) pause(clock func() time.Duration) step {
	s.left = clockLooks
	if s.spinning {
		return s.spin(clock())
	}
	if s.yields == yieldLooks {
		return goToSleep
	}
	s.left = looksBetween
	s.yields++
	s.yielded = true
	return letOthersRun
}

// spin is pause before the first yields.
func (s *spell) spin(now time.Duration) step {
	if s.clocks == 0 {
		s.began = now
	}
	s.last = now
	s.clocks++
	spun := now - s.began
	switch {
	case spun >= s.total || s.clocks >= int(s.total/(clockLooks*lookTime)):
		s.spinning = false
		s.left = 1
	case spun >= s.slice:
		s.slice = 2 * spun
		s.yielded = true
		return letOthersRun
	}
	return lookAgain
}

// early reports whether the rank has begun to spin, and has not looked at the clock.
func (s *spell) early() bool { return s.spinning && s.clocks == 0 }

// stop has the wait sleep next.
func (s *spell) stop() {
	s.looked = true
	s.spinning = false
	s.left = 1
	s.yields = yieldLooks
}

package callers

import "time"

// Ticks are a time by the processor's own clock (the TSC of amd64, the virtual counter of
// arm64), which takes a third of what [time.Now] takes; elsewhere, and on Windows, by the
// system's. It is never 0.
type Ticks uint64

// The same moment by both clocks.
var began, first = moment()

// Now returns the time.
func Now() Ticks { return now() }

// moment reads both clocks, again and again, as a thread may be held up between the two.
func moment() (at time.Time, ticks Ticks) {
	least := ^Ticks(0)
	for range 8 {
		before, between, after := now(), time.Now(), now()
		if after-before < least {
			least, at, ticks = after-before, between, before+(after-before)/2
		}
	}
	return at, ticks
}

// Clock tells what time ticks are. Those that one Clock tells have the order of their
// ticks; another one may tell a microsecond more or less.
type Clock struct {
	perTick float64 // nanoseconds
	// The same moment by both clocks, from which ticks before the first are counted.
	at    time.Time
	ticks Ticks
}

// jumpedTime is for how long a clock is looked at to find out how fast it runs.
const jumpedTime = 5 * time.Millisecond

// NewClock returns a Clock for ticks up to now. It takes the processor's clock to have run
// evenly since the process began; where it did not, times in between are off. One that has
// jumped back to before that, as when a virtual machine moves, is taken to run as it does
// now.
func NewClock() Clock {
	at, ticks := moment()
	if ticks >= first {
		return Clock{float64(at.Sub(began)) / float64(max(ticks-first, 1)), began, first}
	}
	time.Sleep(jumpedTime)
	later, more := moment()
	return Clock{float64(later.Sub(at)) / float64(max(more-ticks, 1)), at, ticks}
}

// Time returns the time of ticks.
func (c Clock) Time(t Ticks) time.Time {
	if t >= first {
		return began.Add(time.Duration(float64(t-first) * c.perTick))
	}
	return c.at.Add(time.Duration(float64(int64(t-c.ticks)) * c.perTick))
}

package poll

import "time"

// pause is what a wait does between two looks.
type pause uint8

const (
	yield pause = iota // let others run who want this processor
	sleep              // the system's sleep, which wakes some microseconds late
	park               // Go's, which wakes up to a millisecond late and leaves the processor to other goroutines
)

// The policy of all waits that look. A wait first looks without a pause, as most collectives take
// microseconds. It then yields between looks, for what takes tens of them: where ranks have a processor each, a yield
// returns at once, and where they share one, it lets the peers run. Then it sleeps between looks, for a share
// of the time that it has waited: the end is noticed late by that share at most, and the longer the wait, the less it
// costs. A share of maxSleep is as long as Go's own timers take, so from then on the wait parks.
//
// Go's timers wake an idle process up to a millisecond late on Linux, so no pause before that is one of them.
const (
	// yieldTime is how long a wait yields. A sleep of a share of it is as short as the system's can be.
	yieldTime = 300 * time.Microsecond
	// quotaYieldTime is yieldTime for processes with a quota. Yields that return at once use it up, and then
	// all ranks of a container stand still for the rest of its period.
	quotaYieldTime = 30 * time.Microsecond
	// share is what the time that a wait has taken is divided by for the next pause.
	share = 32
	// minSleep is as short as the system's sleep can be beside the time that it takes to wake.
	minSleep = 10 * time.Microsecond
	// maxSleep is as late as Go's timers wake: a longer pause is one of them.
	maxSleep = time.Millisecond
	// stallTime is how long a wait takes that is not for the peers' part of a collective alone.
	stallTime = time.Millisecond
	// maxPauses bounds the pauses before those of Go, for a clock that stands while a goroutine looks, as in a bubble of
	// testing/synctest, which only a sleep of Go's ends. Elsewhere a wait parks before: a look and a yield take more
	// than 100 ns, and some 110 sleeps follow.
	maxPauses = 4000
	// standingPauses is after how many pauses a clock that has not moved at all stands. Each is a switch to
	// another process on a busy machine.
	standingPauses = 200
)

// next returns what a wait does after a number of pauses and some time, and for how long.
func next(pauses int, waited time.Duration, quota bool) (pause, time.Duration) {
	limit := yieldTime
	if quota {
		limit = quotaYieldTime
	}
	switch d := max(waited/share, minSleep); {
	case pauses >= maxPauses || pauses >= standingPauses && waited == 0 || d >= maxSleep:
		return park, maxSleep
	case waited < limit:
		return yield, 0
	default:
		return sleep, d
	}
}

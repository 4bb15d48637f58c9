package poll

import "time"

// pause is a wait's action between two polls.
type pause uint8

const (
	yield pause = iota // let other threads run that want this processor
	sleep              // the system's sleep, which wakes some microseconds late
	park               // Go's sleep, which wakes up to a millisecond late and leaves the processor to other goroutines
)

// The policy of all waits that poll. A wait first polls without a pause, because most collectives take microseconds.
// It then yields between polls, for collectives that take tens of them: if each rank has a processor, a yield returns
// at once, and if they share one, it lets the peers run. Then it sleeps between polls, for a share of the time that it
// has waited: it notices the end late by at most that share, and costs less the longer it lasts. When the share
// reaches maxSleep, which Go's own timers can handle, the wait parks.
//
// On Linux Go's timers wake an idle process up to a millisecond late, so no earlier pause uses them.
const (
	// yieldTime is how long a wait yields. A share of it is about the shortest sleep of the system.
	yieldTime = 300 * time.Microsecond
	// quotaYieldTime is yieldTime for processes with a processor quota. Yields that return at once use up the quota,
	// and then all ranks of a container stand still for the rest of its period.
	quotaYieldTime = 30 * time.Microsecond
	// share is the divisor of the waiting time for the next pause.
	share = 32
	// minSleep is the shortest useful sleep, given the time that the system takes to wake.
	minSleep = 10 * time.Microsecond
	// maxSleep is the lateness of Go's timers: longer pauses use them.
	maxSleep = time.Millisecond
	// stallTime is the duration of a wait that is not only for the peers' part of a collective.
	stallTime = time.Millisecond
	// maxPauses bounds the pauses before those of Go. It matters for a clock that stands still while a goroutine
	// polls, as in a bubble of testing/synctest, where only Go's sleep advances it. Elsewhere a wait parks earlier: a
	// poll and a yield take more than 100 ns, and some 110 sleeps follow.
	maxPauses = 4000
	// standingPauses is the number of pauses after which a clock that has not moved is considered to stand still. On a
	// busy machine each pause is a switch to another process.
	standingPauses = 200
)

// next returns a wait's action after a number of pauses and some time, and its duration.
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

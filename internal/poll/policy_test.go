package poll

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// machineModel is what looks and pauses take on a machine whose processors are idle.
var machineModel = struct{ look, yield, wake, late time.Duration }{
	look: time.Microsecond, yield: 300 * time.Nanosecond,
	wake: 15 * time.Microsecond, // how late the system's sleep ends
	late: time.Millisecond,      // how late Go's does
}

// waitCost is what a wait did until it noticed its end.
type waitCost struct {
	yields, sleeps, parks int
	late                  time.Duration // after what it waited for
	busy                  time.Duration // of a processor
}

// simulate plays a wait for something that happens after a time.
func simulate(until time.Duration, quota bool) (c waitCost) {
	var clock time.Duration
	for pauses := 0; ; pauses++ {
		clock += machineModel.look
		c.busy += machineModel.look
		if clock >= until {
			c.late = clock - until
			return c
		}
		switch kind, d := next(pauses, clock, quota); kind {
		case yield:
			c.yields++
			clock += machineModel.yield
			c.busy += machineModel.yield
		case sleep:
			c.sleeps++
			clock += d + machineModel.wake
			c.busy += 2 * time.Microsecond
		case park:
			c.parks++
			clock += d + machineModel.late
			c.busy += 5 * time.Microsecond
		}
	}
}

// TestWaitsAreNoticedInTime: the end of a wait of less than what Go's timers are worth comes late by a small share of it.
func TestWaitsAreNoticedInTime(t *testing.T) {
	for until := time.Microsecond; until < 10*time.Second; until += until/7 + 1 {
		for _, quota := range []bool{false, true} {
			c := simulate(until, quota)
			bound := until/share + minSleep + machineModel.wake + 2*machineModel.look
			if until < yieldTime && !quota {
				bound = 2 * machineModel.look
			}
			if c.parks > 0 {
				bound = maxSleep + machineModel.late + machineModel.look
			}
			assert.LessOrEqual(t, c.late, bound, "%v, quota %v: %+v", until, quota, c)
			assert.Equal(t, until >= share*maxSleep, c.parks > 0, "%v, quota %v: %+v", until, quota, c)
		}
	}
}

// TestWaitsLeaveProcessorsAlone: a wait of milliseconds takes a small share of a processor, and one with a quota
// little from the beginning.
func TestWaitsLeaveProcessorsAlone(t *testing.T) {
	for _, c := range []struct {
		until time.Duration
		quota bool
		share float64
	}{
		{3 * time.Millisecond, false, 0.25},
		{10 * time.Millisecond, false, 0.10},
		{100 * time.Millisecond, false, 0.02},
		{time.Second, false, 0.01},
		{300 * time.Microsecond, true, 0.25},
		{3 * time.Millisecond, true, 0.15},
		{10 * time.Millisecond, true, 0.08},
	} {
		cost := simulate(c.until, c.quota)
		assert.LessOrEqual(t, float64(cost.busy)/float64(c.until), c.share, "%v, quota %v: %+v", c.until, c.quota, cost)
	}
}

// TestPauseCountBoundsYields: the clock of a bubble stands, and the wait sleeps all the same, by Go's clock, and from
// then on.
func TestPauseCountBoundsYields(t *testing.T) {
	for pauses := range standingPauses {
		kind, _ := next(pauses, 0, false)
		assert.Equal(t, yield, kind)
	}
	kind, d := next(standingPauses, 0, false)
	assert.Equal(t, park, kind)
	assert.Equal(t, maxSleep, d)
	kind, _ = next(maxPauses-1, time.Nanosecond, false)
	assert.Equal(t, yield, kind)
	kind, _ = next(maxPauses, time.Nanosecond, false)
	assert.Equal(t, park, kind)
	assert.Zero(t, simulate(share*maxSleep-1, false).parks, "elsewhere the clock comes first")

	synctest.Test(t, func(t *testing.T) {
		pace := Pace{Goroutines: true}
		for range standingPauses + 1 {
			pace.Next()
		}
		began := time.Now()
		for range 10 {
			pace.Next()
		}
		assert.Equal(t, 10*maxSleep, time.Since(began))
	})
}

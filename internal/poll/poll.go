// Package poll waits for things that can only be asked whether they are done,
// such as the work of a device.
package poll

import (
	"context"
	"runtime"
	"time"
)

// The phases of waiting: looks without a pause while an answer is likely any
// moment, then giving up the processor between looks, then sleeping, for a share of
// the time waited so far: what is late by that is late by little.
//
// Go's timers wake an idle process up to a millisecond late on Linux. So a sleep is
// the system's ([pause]) until a share is as long as that.
const (
	spins    = 200
	yields   = 200
	share    = 32
	maxSleep = time.Millisecond
	// The clock may stand still while this goroutine runs, as in a bubble of testing/synctest, which
	// only a sleep of Go's ends: after so many pauses each is one, whatever the clock says. Elsewhere a
	// share has reached maxSleep by then.
	pauses = 1000
)

// Until asks done until it says yes or fails, or until ctx ends, whose cause it
// returns then.
func Until(ctx context.Context, done func() (bool, error)) error {
	started := time.Now()
	for i := 0; ; i++ {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if i >= spins {
			runtime.Gosched()
		}
		if i >= spins+yields {
			d := time.Since(started) / share
			if d < maxSleep && i < spins+yields+pauses {
				pause(d)
			} else {
				time.Sleep(maxSleep)
			}
		}
	}
}

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
			if d := time.Since(started) / share; d < maxSleep {
				pause(d)
			} else {
				time.Sleep(maxSleep)
			}
		}
	}
}

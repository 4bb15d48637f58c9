// Package waiting bounds waits for other processes, and has them say what they wait for.
package waiting

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/internal/env"
)

// ReadLimit reads the value of [env.ConnectTimeout].
func ReadLimit(text string) (time.Duration, error) {
	limit, err := time.ParseDuration(text)
	if err != nil || limit <= 0 {
		return 0, errors.New("want a time, such as 30m")
	}
	return limit, nil
}

// Bounded returns ctx if it has a deadline, and otherwise a context that ends after limit, or [DefaultLimit] for 0.
func Bounded(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	if limit <= 0 {
		limit = DefaultLimit
	}
	const format = "%w: no deadline was set, so the limit is %v (%s)"
	cause := fmt.Errorf(format, context.DeadlineExceeded, limit, env.ConnectTimeout)
	return context.WithTimeoutCause(ctx, limit, cause)
}

// Over reports whether ctx has ended, or its deadline has passed: system calls that have the same deadline may fail a
// moment before ctx says so.
func Over(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// Reminder tells when a wait is to say what it waits for: after 2 s, and then ever less often.
type Reminder struct {
	C     <-chan time.Time // gets a time whenever the wait is to say something
	timer *time.Timer      // behind C
	began time.Time        // when the wait began
	pause time.Duration    // until the next time; doubles up to longest
}

// Remind begins a wait.
func Remind() *Reminder {
	timer := time.NewTimer(first)
	return &Reminder{
		C:     timer.C,
		timer: timer,
		began: time.Now(),
		pause: first,
	}
}

// Next sets the time of the next value of C, and returns how long the wait has taken.
func (r *Reminder) Next() (waited time.Duration) {
	r.pause = min(2*r.pause, longest)
	r.timer.Reset(r.pause)
	return time.Since(r.began).Round(time.Second)
}

// Stop ends the wait.
func (r *Reminder) Stop() { r.timer.Stop() }

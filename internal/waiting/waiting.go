// Package waiting bounds waits for other processes, and reminds them to say what they wait for.
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

// Over reports whether ctx has ended, or its deadline has passed: system calls with the same deadline may fail a
// moment before ctx ends.
func Over(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// Reminder reminds a wait to say what it waits for: after 2 s, and then at increasing intervals.
type Reminder struct {
	C     <-chan time.Time // receives a time at each reminder
	timer *time.Timer      // the source of C
	began time.Time        // when the wait began
	pause time.Duration    // until the next reminder; doubles up to longest
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

// Next sets the time of the next reminder, and returns how long the wait has lasted.
func (r *Reminder) Next() (waited time.Duration) {
	r.pause = min(2*r.pause, longest)
	r.timer.Reset(r.pause)
	return time.Since(r.began).Round(time.Second)
}

// Stop ends the wait.
func (r *Reminder) Stop() { r.timer.Stop() }

// Package poll waits for events that can only be polled, such as the end of a device's work or another process's
// writes to shared memory. All waits follow one policy; see [Pace].
package poll

import "context"

// deviceLooks is the number of polls of Until before the first pause: a device takes microseconds for the smallest
// task.
const deviceLooks = 200

// Until polls done until it returns true or an error, or until ctx ends; then it returns the cause.
func Until(ctx context.Context, done func() (bool, error)) error {
	pace := Pace{Goroutines: true}
	for looks := deviceLooks; ; looks = 1 {
		for range looks {
			if ok, err := done(); ok || err != nil {
				return err
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
		}
		pace.Next()
	}
}

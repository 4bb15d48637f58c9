// Package poll waits for things that can only be asked whether they are done, such as the work of a device or what
// another process writes to shared memory. All waits follow one policy; see [Pace].
package poll

import "context"

// deviceLooks is how often Until asks before the first pause: a device takes microseconds for the least that it does.
const deviceLooks = 200

// Until asks done until it says yes or fails, or until ctx ends, whose cause it
// returns then.
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

package poll

import (
	"syscall"
	"time"
)

// pause sleeps for d, or less if a signal comes, and some 50 µs more. Of the processors
// that goroutines run on it keeps one meanwhile, so it is for what is short.
func pause(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil)
}

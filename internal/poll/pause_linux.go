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

// Yield lets other processes run on this processor. It leaves out the
// Go scheduler on purpose: its yield wakes up another thread, which costs far
// more than what is waited for. Other goroutines run on the other threads, and
// on this one when the wait has come to sleeping.
func Yield() {
	_, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0)
}

package poll

import (
	"syscall"
	"time"
)

// Sleep sleeps for d, or less if a signal comes, and some 10 µs more; [time.Sleep] wakes up to a millisecond late. It
// occupies one of the processors for goroutines meanwhile, so it is for short pauses.
func Sleep(d time.Duration) {
	// By default a thread's timers may fire 50 µs late, so that the system wakes up less often. Threads that wait for
	// microseconds get less slack.
	_, _, _ = syscall.RawSyscall6(syscall.SYS_PRCTL, syscall.PR_SET_TIMERSLACK, timerSlack, 0, 0, 0, 0)
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil)
}

// timerSlack is in nanoseconds.
const timerSlack = 1000

// Yield lets other processes run on this processor. It bypasses the Go scheduler on purpose: the scheduler's yield
// wakes another thread, which costs far more than the wait. Other goroutines run on the other threads, and on this one
// once the wait sleeps.
func Yield() {
	_, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0)
}

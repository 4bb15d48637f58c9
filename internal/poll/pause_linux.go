package poll

import (
	"syscall"
	"time"
)

// Sleep sleeps for d, or less if a signal comes, and some 10 µs more, where [time.Sleep] wakes up to a millisecond
// late. Of the processors that goroutines run on it keeps one meanwhile, so it is for what is short.
func Sleep(d time.Duration) {
	// A thread's timers may wake 50 µs late by default, so that the system wakes up less often. Threads that wait
	// for microseconds have less slack from here on.
	_, _, _ = syscall.RawSyscall6(syscall.SYS_PRCTL, syscall.PR_SET_TIMERSLACK, timerSlack, 0, 0, 0, 0)
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil)
}

// timerSlack is in nanoseconds.
const timerSlack = 1000

// Yield lets other processes run on this processor. It leaves out the
// Go scheduler on purpose: its yield wakes up another thread, which costs far
// more than what is waited for. Other goroutines run on the other threads, and
// on this one when the wait has come to sleeping.
func Yield() {
	_, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0)
}

package poll

import "golang.org/x/sys/unix"

// Yield lets other processes run on this processor. It leaves out the
// Go scheduler on purpose: its yield wakes up another thread, which costs far
// more than what is waited for. Other goroutines run on the other threads, and
// on this one when the wait has come to sleeping.
func Yield() {
	_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
}

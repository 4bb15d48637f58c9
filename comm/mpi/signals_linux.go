package mpi

import (
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// goSignals are the signals that Go programs rely on; others, such as SIGUSR1,
// some MPI libraries work with.
var goSignals = []unix.Signal{
	unix.SIGILL, unix.SIGTRAP, unix.SIGBUS, unix.SIGFPE, unix.SIGSEGV, // faults
	unix.SIGURG, unix.SIGPROF,
	unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM,
}

// handlers are the kernel's struct sigaction of each of goSignals, the zero
// value of one that could not be asked.
type handlers [][8]uint64

func signalHandlers() handlers {
	all := make(handlers, len(goSignals))
	for i, signal := range goSignals {
		if !sigaction(signal, 0, hostmem.Addr(all[i][:])) {
			all[i] = [8]uint64{}
		}
	}
	runtime.KeepAlive(all)
	return all
}

// restore puts back what changed.
func (before handlers) restore() {
	for i, now := range signalHandlers() {
		if now != before[i] {
			sigaction(goSignals[i], hostmem.Addr(before[i][:]), 0)
		}
	}
	runtime.KeepAlive(before)
}

// sigaction is rt_sigaction(2) with sets of 64 signals.
func sigaction(signal unix.Signal, action, old uintptr) bool {
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(signal), action, old, 8, 0, 0)
	return errno == 0
}

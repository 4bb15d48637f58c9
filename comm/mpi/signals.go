package mpi

import (
	"os"
	"os/signal"
	"syscall"
)

// Go turns faults into panics, preempts goroutines, profiles and reports
// interrupts by signals. A library that takes their handlers for itself ends
// that: UCX, on which MPICH and Open MPI may work, does it on being loaded, and
// a nil pointer then kills the process that would have recovered.

// handleErrorsVariable chooses UCX's reaction to faults.
const handleErrorsVariable = "UCX_HANDLE_ERRORS"

// keepSignals runs f, in which libraries are opened or initialized, and puts
// the handlers back that these signals had before. UCX is also asked to take
// none, unless the user told it what to do.
func keepSignals(f func()) {
	if _, told := os.LookupEnv(handleErrorsVariable); !told {
		os.Setenv(handleErrorsVariable, "none") //nolint:errcheck // reaches C's environment as well
	}
	saved := signalHandlers()
	defer saved.restore()
	f()
}

// catchBrokenPipes keeps SIGPIPE from ending the process. A library's own threads may get it
// when they write to a peer that has exited, and Go ends a process that gets it on a thread
// that Go has not made, unless the program asks for the signal.
func catchBrokenPipes() {
	if !signal.Ignored(syscall.SIGPIPE) {
		signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	}
}

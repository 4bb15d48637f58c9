//go:build unix

package instrument

import (
	"os"
	"syscall"
)

// dumpSignals have a [Run] write its dump and go on, endSignals before they end the process.
var (
	dumpSignals = []os.Signal{syscall.SIGUSR1}
	endSignals  = []os.Signal{syscall.SIGTERM}
)

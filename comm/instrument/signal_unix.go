//go:build unix

package instrument

import (
	"os"
	"syscall"
)

// dumpSignals are those that [Run] listens to.
var dumpSignals = []os.Signal{syscall.SIGUSR1}

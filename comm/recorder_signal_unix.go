//go:build unix

package comm

import (
	"os"
	"syscall"
)

// dumpSignals are those that [Examine] listens to.
var dumpSignals = []os.Signal{syscall.SIGUSR1}

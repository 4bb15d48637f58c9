//go:build unix

package comm

import (
	"os"
	"syscall"
)

// dumpSignals are those that [RecordFromEnv] listens to.
var dumpSignals = []os.Signal{syscall.SIGUSR1}

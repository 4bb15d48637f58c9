//go:build !unix

package instrument

import "os"

// This system has no signals for programs to use.
var dumpSignals, endSignals []os.Signal

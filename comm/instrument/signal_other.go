//go:build !unix

package instrument

import "os"

// dumpSignals: this system has none for programs to use.
var dumpSignals []os.Signal

//go:build windows || (!amd64 && !arm64)

package callers

import "time"

var start = time.Now()

// now reads the system's clock. That of Windows is as fast as the processor's, but moves
// on by milliseconds at a time: there is no telling from it how long a tick of the other is.
func now() Ticks { return 1 + Ticks(time.Since(start)) }

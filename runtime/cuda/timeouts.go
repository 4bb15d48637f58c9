package cuda

import "time"

const (
	// closeTimeout bounds each of the waits of Close: a kernel that never ends is not to keep a program from ending.
	closeTimeout = 30 * time.Second
	// flushTimeout bounds how long a fence waits: Trim then leaves memory to a later one.
	flushTimeout = 5 * time.Second
)

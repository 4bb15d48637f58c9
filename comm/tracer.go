package comm

import "time"

// Tracer is implemented by communicators that keep a timeline, as a flight recorder (comm/record) does. Package
// distributed/ddp names its steps for it, and a program may name parts of its time. Find it by [As].
type Tracer interface {
	// Span says that something called name began at started and ends now. It may be called from any
	// goroutine, and allocates nothing.
	Span(name string, started time.Time)
}

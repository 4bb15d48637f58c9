package kernel

import "context"

// AsyncCopier is implemented by runtimes of asynchronous devices.
type AsyncCopier interface {
	// NewHostCopy returns a copy of bytes bytes, at least one.
	NewHostCopy(bytes int) (HostCopy, error)
}

// Span is memory of a device.
type Span struct {
	Ptr   uintptr // address
	Bytes int     // length
}

// HostCopy is an asynchronous copy of device memory to the host, in stream order. It belongs
// to one goroutine at a time.
type HostCopy interface {
	// Post submits the copy of spans, whose total length is the length of the HostCopy, behind the
	// work submitted to the compute stream so far, and returns. The stream's later work does not
	// wait for it: the spans must not change until the copy is Ready. Copies are made in the
	// order in which they were posted, and the last one remains. They cannot be captured.
	Post(spans []Span) error
	// Ready reports, without waiting, whether the copy that was posted last is made, or
	// none was.
	Ready() (bool, error)
	// Read waits for the copy that was posted last, or until ctx is done. It returns the bytes, valid until the next
	// Post or Close.
	Read(ctx context.Context) ([]byte, error)
	// Close waits for the copy, as long as Close of the runtime does for anything, and
	// gives the memory back. Closing twice is fine. Without it the runtime's Close
	// reports a leak.
	Close() error
}

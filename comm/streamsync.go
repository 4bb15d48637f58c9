package comm

// StreamSyncOps orders a communicator's stream against other streams of the
// device, without blocking the host, so that communication overlaps with
// compute. Find it with [As]. Handles are native (CUevent, CUstream on CUDA).
//
// The life of an event:
//
//  1. CreateEvent
//  2. RecordOnStream on the compute stream: the gradient is ready
//  3. CommStreamWaitEvent: the communicator waits for it
//  4. AllReduce, which runs on the communicator's stream
//  5. RecordOnCommStream: the result is ready
//  6. StreamWaitEvent: the compute stream waits for it
//  7. DestroyEvent
//
// The contract is numr's StreamSyncOps
// (https://docs.rs/numr, runtime::communicator).
type StreamSyncOps interface {
	// CreateEvent makes an event for ordering only (no timing).
	CreateEvent() (event uintptr, err error)
	// DestroyEvent frees it.
	DestroyEvent(event uintptr) error
	// RecordOnCommStream records event after everything submitted so far.
	RecordOnCommStream(event uintptr) error
	// RecordOnStream records event on another stream.
	RecordOnStream(event, stream uintptr) error
	// CommStreamWaitEvent makes later communication wait for event.
	CommStreamWaitEvent(event uintptr) error
	// StreamWaitEvent makes later work of another stream wait for event.
	StreamWaitEvent(stream, event uintptr) error
	// SyncCommStream blocks the host until the communicator's stream is idle.
	SyncCommStream() error
}

// StreamOrder orders a communicator's stream against another stream of the
// device as [StreamSyncOps] does, but keeps the events itself. It records
// nothing if both are the same stream. Find it with [As].
type StreamOrder interface {
	// CommStream is the stream that communication is submitted to.
	CommStream() uintptr
	// CommAfter makes communication submitted from now on wait for the work
	// submitted to stream so far.
	CommAfter(stream uintptr) error
	// AfterComm makes work submitted to stream from now on wait for the
	// communication submitted so far.
	AfterComm(stream uintptr) error
}

// Package nccl runs collectives between NVIDIA GPUs, on NCCL 2.18 or newer.
//
// The library is opened when the first communicator is made, never linked. Each
// communicator submits to its own stream on its runtime's device.
// [comm.StreamOrder] and [comm.StreamSyncOps] order that against other
// streams, as package distributed does with the runtime's compute stream.
//
// NCCL matches messages between two ranks by order alone, so tags are ignored.
// It does not detect a message of another length than its receive. A send or
// receive outside a Group delays what its rank submits later until the peer has
// submitted its side.
//
// CUDA graphs may hold collectives, whether [cuda.Stream.Capture] captures them or a framework with its own calls:
// on the communicator's stream, or on one that CommAfter and AfterComm order with it inside the capture. Without
// these, a collective runs at once and is no part of the graph. Sync and Barrier of a stream that is captured are
// [comm.ErrArgument], and end the capture; the communicator goes on.
// Make communicators and symmetric memory before a framework captures in the global mode, PyTorch's default: NCCL's own
// threads allocate memory for them, which may end the capture.
package nccl

// How the package is written:
//
//	nccl.go          InProcess, From and FromEnv; id.go: how the unique id gets to all ranks
//	run.go           Run and New, which open the GPUs of a process
//	communicator.go  Comm; connect.go and close.go: its beginning and end
//	submit.go        calls, as the native calls of plan.go; submissions.go counts them
//	wait.go          Sync and Barrier; failure.go: how they fail; peers.go: how the other ranks learn of it
//	native.go        ncclComm_t, how it is made and freed; services.go: NCCL's threads
//	control.go       the native communicator that others are made from; split.go: Split and Shrink
//	symmetric.go     windows; windows.go: which calls use them, windowtable.go: at which sizes
//	library.go       the functions of libnccl and its errors; config.go: its configuration
//	timeouts.go      all times
//
// Lock order, outermost first; locks on one line are never held together:
//
//	the end of a backend.Life (held during Abort and Release)
//	control.mu (held while NCCL makes a communicator) · Comm.mu (held during a call of another native communicator)
//	native.calls · Comm.streamMu · frees.mu · serviceThreads.mu · abandonedCells.mu
//	marks.Marks · mark.mu
//	submissions.mu
//	backend.Ledger · those of a peers.Group
//
// Waits for other ranks hold no lock but these: an abort and a release the end of their Life, the creation of a native
// communicator control.mu, and a launch Comm.mu, which waits for what is being freed, or blocks until the peers come.
// In the latter case an abort from outside ends it (see guarded).

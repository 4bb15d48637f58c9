// Package nccl runs collectives between NVIDIA GPUs, on NCCL 2.18 or newer.
//
// The library is opened when the first communicator is made, and never linked. Each communicator submits to its own
// stream on its runtime's device. [comm.StreamOrder] and [comm.StreamSyncOps] order that stream with others; package
// distributed does so for the runtime's compute stream.
//
// NCCL matches messages between two ranks by order alone, so tags are ignored. It does not detect a message whose
// length differs from its receive. A send or receive outside a Group delays the rank's later submissions until the
// peer has submitted its side.
//
// CUDA graphs may hold collectives, whether [cuda.Stream.Capture] or a framework captures them: on the communicator's
// stream, or on one that CommAfter and AfterComm order with it inside the capture. Without this order, a collective
// runs at once and is not part of the graph. Sync and Barrier during a capture of their stream return
// [comm.ErrArgument] and end the capture; the communicator stays usable. Make communicators and symmetric memory
// before a framework captures in the global mode, PyTorch's default: NCCL's own threads allocate memory for them,
// which may end the capture.
package nccl

// Files of the package:
//
//	nccl.go          InProcess, From and FromEnv; id.go: distribution of the unique id
//	run.go           Run and New, which open the GPUs of a process
//	communicator.go  Comm; connect.go and close.go: its creation and release
//	submit.go        calls, as the native calls of plan.go; submissions.go counts them
//	wait.go          Sync and Barrier; failure.go: their failures; peers.go: telling other ranks
//	native.go        ncclComm_t, its creation and release; services.go: NCCL's threads
//	control.go       the native communicator from which others are made; split.go: Split and Shrink
//	symmetric.go     windows; windows.go: calls that use them, windowtable.go: at which sizes
//	library.go       the functions of libnccl and its errors; config.go: its configuration
//	timeouts.go      all timeouts
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
// A wait for other ranks holds at most one of these locks. An abort or release holds the end of its Life. The creation
// of a native communicator holds control.mu. A launch holds Comm.mu: it waits for communicators that are being freed,
// or blocks until the peers join, which an abort from outside can end (see guarded).

package comm

import (
	"context"

	"github.com/tutti-go/tutti/runtime"
)

// Reacher is implemented by communicators that reach only some memory.
// CheckDevice returns an error wrapping [ErrDevice] for memory that they
// cannot read and write, naming what would help. Code that knows the device of
// a buffer (package distributed) asks before it communicates; a communicator
// without this method takes anything.
type Reacher interface {
	CheckDevice(d runtime.Device) error
}

// SymmetricAllocator is implemented by communicators that have faster
// collectives on memory which all ranks allocate together; find it with [As].
//
// Such a buffer is used symmetrically: every rank passes the same part of the
// same buffer to a collective, as it would pass the same count. A rank that
// passes another part, or another buffer, makes the result undefined on all.
type SymmetricAllocator interface {
	// AllocateSymmetric returns memory of the communicator's device, which is
	// collective: all ranks ask for the same number of bytes, otherwise all get
	// [ErrMismatch]. When a rank has no memory left, all of them fail. Zero
	// bytes give address 0.
	AllocateSymmetric(ctx context.Context, bytes int) (uintptr, error)
	// FreeSymmetric waits for all ranks, and gives a buffer back. It is
	// collective: all ranks free their buffers in the same order. Close frees
	// what is left; a rank that gives up alone leaves it to that, because its
	// peers may be calling something else.
	FreeSymmetric(ctx context.Context, buf uintptr) error
}

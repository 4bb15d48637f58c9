package comm

import (
	"context"

	"github.com/tutti-go/tutti/runtime"
)

// CheckDevice returns an error wrapping [ErrDevice] if c, or a communicator that it wraps, reports that it cannot
// reach memory of d (backend.MemoryChecker). Code that knows a buffer's device, such as package distributed, calls it
// before it communicates.
func CheckDevice(c Communicator, d runtime.Device) error {
	checker, ok := As[interface{ CheckDevice(d runtime.Device) error }](c)
	if !ok {
		return nil
	}
	return checker.CheckDevice(d)
}

// SymmetricAllocator is implemented by communicators that have faster
// collectives on memory which all ranks allocate together; see [Allocate].
//
// Such a buffer is used symmetrically: every rank passes the same part of the
// same buffer to a collective, as it would pass the same count. A rank that
// passes another part, or another buffer, makes the result undefined on all.
type SymmetricAllocator interface {
	// AllocateSymmetric allocates memory of the communicator's device. It is collective: all ranks ask for the same
	// number of bytes, otherwise all get [ErrMismatch]. If a rank has no memory left, all of them fail. Zero bytes
	// give address 0.
	AllocateSymmetric(ctx context.Context, bytes int) (uintptr, error)
	// FreeSymmetric waits for all ranks, and frees a buffer. It is collective: all ranks free their buffers in the
	// same order. Close frees the remaining buffers. A rank that aborts alone leaves them to Close, because its peers
	// may be calling something else.
	FreeSymmetric(ctx context.Context, buf uintptr) error
}

// Buffer is memory for communication; see [Allocate].
type Buffer struct {
	Ptr       uintptr            // 0 for no bytes, and when it was freed
	rt        runtime.Runtime    // where it was allocated
	symmetric SymmetricAllocator // nil: it is rt's
}

// Allocate returns memory for collectives of c: symmetric memory if c, or a communicator that it wraps, is a
// [SymmetricAllocator], otherwise memory of rt, which c reaches. Symmetric allocation is collective, so all ranks
// call Allocate together, with the same number of bytes.
func Allocate(ctx context.Context, c Communicator, rt runtime.Runtime, bytes int) (*Buffer, error) {
	b := &Buffer{rt: rt}
	var err error
	if a, ok := As[SymmetricAllocator](c); ok {
		b.symmetric = a
		b.Ptr, err = a.AllocateSymmetric(ctx, bytes)
	} else {
		b.Ptr, err = rt.Allocate(bytes)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Free gives the memory back. It is collective if Allocate was. Freeing twice is
// fine.
func (b *Buffer) Free(ctx context.Context) error {
	ptr := b.Ptr
	b.Ptr = 0
	switch {
	case ptr == 0:
		return nil
	case b.symmetric != nil:
		return b.symmetric.FreeSymmetric(ctx, ptr)
	}
	return b.rt.Deallocate(ptr)
}

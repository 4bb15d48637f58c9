package runtime

import "errors"

// Sentinels that errors of this package and of every Runtime wrap.
var (
	// ErrClosed: the runtime was closed.
	ErrClosed = errors.New("runtime is closed")
	// ErrOutOfMemory: the system has no memory of the requested size, even after the cache was flushed.
	ErrOutOfMemory = errors.New("out of memory")
	// ErrFrozen: the pool is frozen and holds no block of that size.
	ErrFrozen = errors.New("allocator is frozen")
	// ErrDoubleFree: the block was already freed.
	ErrDoubleFree = errors.New("memory was freed already")
	// ErrForeignPointer: the runtime never handed out that address.
	ErrForeignPointer = errors.New("pointer was not allocated by this runtime")
	// ErrLeak: memory was still live at Close.
	ErrLeak = errors.New("memory still live: free tensors, close communicators and exchanges first")
	// ErrArgument: an argument is out of range.
	ErrArgument = errors.New("invalid argument")
	// ErrFreed: a tensor was used after Free.
	ErrFreed = errors.New("tensor was freed")
	// ErrShape: shapes, strides or element counts do not fit.
	ErrShape = errors.New("shape mismatch")
	// ErrDType: the element type does not fit.
	ErrDType = errors.New("dtype mismatch")
	// ErrDevice: memory, a stream or a tensor belongs to a device that cannot be used here.
	ErrDevice = errors.New("wrong device")
	// ErrNotContiguous: the operation needs contiguous elements.
	ErrNotContiguous = errors.New("tensor is not contiguous")
	// ErrUnsupported: this device cannot do that.
	ErrUnsupported = errors.New("unsupported")
	// ErrUnavailable: the library, the driver or the device is not there.
	ErrUnavailable = errors.New("not available")
	// ErrBroken: an earlier fault made the device unusable for this process.
	ErrBroken = errors.New("device is broken")
)

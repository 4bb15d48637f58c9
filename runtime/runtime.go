// Package runtime makes, copies and views tensors in the memory of a device. A
// [Runtime] hands out that memory as uintptr, copies it, and reports what it holds.
//
// The contract is small on purpose. Features of some devices are separate interfaces, found by type assertion on a
// [Runtime]: [Freezer] for allocators that can be frozen, [StreamForker] for side streams. A [Tensor] is an array in
// the memory of a Runtime. Package runtime/kernel, for authors of devices, has the kernels that the library's own
// patterns need.
//
// Implementations: runtime/cpu (host memory) and runtime/cuda (GPU memory).
// Every implementation passes the suite in runtime/runtimetest.
package runtime

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/dtype"
)

// Kind says which sort of memory a device has.
type Kind string

// The kinds of devices this module ships runtimes for.
const (
	CPU  Kind = "cpu"
	CUDA Kind = "cuda"
)

// Device identifies one memory space, such as cpu:0 or cuda:3.
type Device struct {
	Kind  Kind // such as CPU
	Index int  // among the devices of its kind
}

// String returns the device as "kind:index".
func (d Device) String() string {
	return fmt.Sprintf("%s:%d", d.Kind, d.Index)
}

// Runtime owns the memory of one device.
//
// Work on memory is ordered on the runtime's compute stream: a method returns
// once its work is submitted, later methods see its effect, and Synchronize
// waits for all of it. On a device without streams every method finishes
// before it returns. Copies between host and device return when the host
// slice may be reused (CopyIn) or holds the data (CopyOut).
//
// All methods are safe for concurrent use. Errors wrap the sentinels of this
// package ([ErrClosed], [ErrOutOfMemory], …). A negative length, and a nil
// pointer with a length above zero, is [ErrArgument]; after Close everything
// but Stats and Close is [ErrClosed].
type Runtime interface {
	// Name is a short human-readable name, such as "cpu" or "NVIDIA H200".
	Name() string
	// Device identifies the memory that Allocate hands out.
	Device() Device

	// Allocate returns the address of at least bytes bytes, aligned to 64
	// bytes or better, with undefined content. Zero bytes gives address 0,
	// which Deallocate accepts.
	Allocate(bytes int) (uintptr, error)
	// Deallocate gives memory back to the runtime's pool. A pointer that was freed before, or that this runtime never
	// handed out (one into the middle of a block, for instance), is an error ([ErrDoubleFree], [ErrForeignPointer]) and
	// changes nothing. A block whose memory went back to the system since is foreign.
	Deallocate(ptr uintptr) error

	// CopyIn copies host bytes to device memory.
	CopyIn(dst uintptr, src []byte) error
	// CopyOut copies device memory to host bytes.
	CopyOut(dst []byte, src uintptr) error
	// Copy copies within the device. The regions must not overlap unless they
	// are the same.
	Copy(dst, src uintptr, bytes int) error
	// CopyStrided copies an array of the given shape between two layouts.
	// Strides are in elements and may be zero (broadcast, source only) or
	// negative; dst and src are the addresses of the first elements, which with
	// negative strides are not the lowest. elemSize is in bytes: 1, 2, 4 or 8 on
	// every device. The regions must not overlap.
	CopyStrided(dst uintptr, dstStrides []int, src uintptr, srcStrides []int, shape []int, elemSize int) error
	// Fill stores value, rounded to dt as [dtype.FromFloat64] does, in count
	// consecutive elements.
	Fill(dst uintptr, count int, dt dtype.DType, value float64) error

	// Synchronize waits until all submitted work is done, or ctx is. A ctx that is done already is an error even if no
	// work is in flight.
	Synchronize(ctx context.Context) error
	// ComputeStream is the native handle of the stream that work is ordered on, 0 if there is none (CPU).
	ComputeStream() uintptr

	// Stats reports the allocator's counters.
	Stats() Stats
	// Close returns all memory to the system, including live blocks, which it reports as an error wrapping [ErrLeak].
	// Closing twice is fine.
	Close() error
}

// Stats are the counters of a pooled allocator. Bytes are counted after
// rounding to the allocator's size classes.
type Stats struct {
	LiveBytes   int64 // handed out now
	PeakBytes   int64 // highest LiveBytes so far
	CachedBytes int64 // held for reuse, not handed out
	LiveBlocks  int64 // allocations handed out now
	Allocations int64 // calls of Allocate that succeeded
	PoolHits    int64 // of these, served without asking the system
	Frozen      bool  // see Freezer
}

// Freezer is implemented by runtimes whose pool can be frozen: while frozen,
// Allocate serves only from cached memory (otherwise [ErrFrozen]) and nothing
// goes back to the system. A captured graph needs that: the addresses it
// recorded must stay valid and no allocation may reach the driver.
//
// Freezing nests: the pool thaws when Unfreeze was called as often as Freeze. An extra Unfreeze does nothing.
type Freezer interface {
	// Freeze freezes the pool once more.
	Freeze()
	// Unfreeze takes one Freeze back.
	Unfreeze()
	// Trim returns cached memory to the system and reports how many bytes. While
	// frozen it returns none, and [ErrFrozen].
	Trim() (int64, error)
}

// StreamForker is implemented by runtimes of devices that run several streams of work at a
// time.
type StreamForker interface {
	// ForkStream returns another runtime for the same device, whose compute stream is a
	// side stream of this one, with its own pool. Each can access what the other has allocated;
	// only events order their work (package comm's StreamSyncOps). The fork is closed
	// before this runtime, and is frozen together with it.
	ForkStream() (Runtime, error)
}

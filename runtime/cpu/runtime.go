package cpu

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/pool"
	"github.com/tutti-go/tutti/runtime/internal/strided"
)

// Runtime owns host memory that lives outside the Go heap, so that the
// uintptrs it hands out stay valid whatever the garbage collector does. Every
// method finishes its work before it returns, and all are safe for concurrent
// use. Make one with [New].
//
// It implements [runtime.Runtime], [runtime.Freezer] and [kernel.Provider].
type Runtime struct {
	pool *pool.Pool // of memory
}

var (
	_ runtime.Runtime = (*Runtime)(nil)
	_ runtime.Freezer = (*Runtime)(nil)
)

// New returns a runtime with an empty pool. It takes memory from the system
// only when Allocate is called.
func New() *Runtime {
	return &Runtime{pool: pool.New(pool.Config{
		Name:      "cpu",
		System:    hostMemory{},
		SlabBytes: slabBytes,
		PageBytes: os.Getpagesize(),
		Colors:    16,
	})}
}

// Name returns "cpu".
func (rt *Runtime) Name() string { return "cpu" }

// Device returns cpu:0; host memory is one space for all runtimes of a process.
func (rt *Runtime) Device() runtime.Device {
	return runtime.Device{Kind: runtime.CPU}
}

// Allocate returns memory aligned to 64 bytes, from the pool when it can.
func (rt *Runtime) Allocate(bytes int) (uintptr, error) {
	return rt.pool.Allocate(bytes)
}

// Deallocate gives memory back to the pool.
func (rt *Runtime) Deallocate(ptr uintptr) error {
	return rt.pool.Deallocate(ptr)
}

// CopyIn copies host bytes to memory of the runtime.
func (rt *Runtime) CopyIn(dst uintptr, src []byte) error {
	if err := rt.check("copy in", len(src), dst); err != nil {
		return err
	}
	copy(hostmem.Slice[byte](dst, len(src)), src)
	return nil
}

// CopyOut copies memory of the runtime to host bytes.
func (rt *Runtime) CopyOut(dst []byte, src uintptr) error {
	if err := rt.check("copy out", len(dst), src); err != nil {
		return err
	}
	copy(dst, hostmem.Slice[byte](src, len(dst)))
	return nil
}

// Copy copies bytes from src to dst.
func (rt *Runtime) Copy(dst, src uintptr, bytes int) error {
	if err := rt.check("copy", bytes, dst, src); err != nil {
		return err
	}
	copy(hostmem.Slice[byte](dst, bytes), hostmem.Slice[byte](src, bytes))
	return nil
}

// CopyStrided copies an array between two layouts.
func (rt *Runtime) CopyStrided(dst uintptr, dstStrides []int, src uintptr, srcStrides []int, shape []int,
	elemSize int) error {
	if rt.pool.Closed() {
		return errClosed("copy strided")
	}
	var buffer [maxAxes]strided.Axis
	all, count, err := strided.Axes(buffer[:0], dstStrides, srcStrides, shape, elemSize)
	if err != nil {
		return fmt.Errorf("cpu: copy strided: %w", err)
	}
	if err := rt.check("copy strided", count, dst, src); err != nil || count == 0 {
		return err
	}
	copyStrided(dst, src, all, elemSize)
	return nil
}

// Fill stores value in count consecutive elements.
func (rt *Runtime) Fill(dst uintptr, count int, dt dtype.DType, value float64) error {
	if err := rt.check("fill", count, dst); err != nil {
		return err
	}
	bits, err := dtype.FromFloat64(dt, value)
	if err != nil {
		return fmt.Errorf("cpu: fill: %w: %w", runtime.ErrDType, err)
	}
	switch dt.Size() {
	case 1:
		fill(dst, count, uint8(bits))
	case 2:
		fill(dst, count, uint16(bits))
	case 4:
		fill(dst, count, uint32(bits))
	case 8:
		fill(dst, count, bits)
	}
	return nil
}

func fill[T uint8 | uint16 | uint32 | uint64](dst uintptr, count int, value T) {
	s := hostmem.Slice[T](dst, count)
	// Memory is filled by copying a piece that stays in the cache.
	const piece = 1024
	for i := range min(piece, count) {
		s[i] = value
	}
	for i := piece; i < count; i += piece {
		copy(s[i:], s[:piece])
	}
}

// Synchronize returns at once unless ctx is done: no work is ever in flight.
func (rt *Runtime) Synchronize(ctx context.Context) error {
	if rt.pool.Closed() {
		return errClosed("synchronize")
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("cpu: synchronize: %w", err)
	}
	return nil
}

// ComputeStream returns 0: there are no streams.
func (rt *Runtime) ComputeStream() uintptr { return 0 }

// Stats reports the pool's counters.
func (rt *Runtime) Stats() runtime.Stats {
	return rt.pool.Stats()
}

// Freeze stops the pool from exchanging memory with the system.
func (rt *Runtime) Freeze() {
	rt.pool.Freeze()
}

// Unfreeze ends one Freeze.
func (rt *Runtime) Unfreeze() {
	rt.pool.Unfreeze()
}

// Trim returns cached memory to the system and reports how many bytes.
func (rt *Runtime) Trim() (int64, error) {
	return rt.pool.Trim()
}

// Close returns all memory to the system, and the memory of wrapped slices to its owners. Memory that is still live
// becomes invalid and is reported as an error that wraps [runtime.ErrLeak].
func (rt *Runtime) Close() error {
	return errors.Join(rt.pool.Close(), rt.unpinAll())
}

// check is what all operations on memory check: that the runtime is open, the
// length (in bytes or elements) is not negative and, unless it is zero, no
// pointer is nil.
func (rt *Runtime) check(op string, length int, pointers ...uintptr) error {
	if rt.pool.Closed() {
		return errClosed(op)
	}
	if length < 0 {
		return fmt.Errorf("cpu: %s: length %d: %w", op, length, runtime.ErrArgument)
	}
	for _, p := range pointers {
		if p == 0 && length > 0 {
			return fmt.Errorf("cpu: %s: nil pointer: %w", op, runtime.ErrArgument)
		}
	}
	return nil
}

func errClosed(op string) error {
	return fmt.Errorf("cpu: %s: %w", op, runtime.ErrClosed)
}

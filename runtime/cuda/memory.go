package cuda

import (
	"context"
	"fmt"
	"math"
	goruntime "runtime"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// CopyIn implements [runtime.Runtime]. Pageable memory is staged by the driver
// before the call returns, but pinned memory is not, so the copy is waited for.
func (r *Runtime) CopyIn(dst uintptr, src []byte) error {
	if err := r.check("copy in", len(src), dst); err != nil || len(src) == 0 {
		return err
	}
	err := r.CopyInAsync(r.compute, dst, src)
	if err == nil {
		err = r.compute.Synchronize(context.Background())
	}
	goruntime.KeepAlive(src)
	return err
}

// CopyOut implements [runtime.Runtime].
func (r *Runtime) CopyOut(dst []byte, src uintptr) error {
	if err := r.check("copy out", len(dst), src); err != nil || len(dst) == 0 {
		return err
	}
	err := r.CopyOutAsync(r.compute, dst, src)
	if err == nil {
		err = r.compute.Synchronize(context.Background())
	}
	goruntime.KeepAlive(dst)
	return err
}

// Copy implements [runtime.Runtime].
func (r *Runtime) Copy(dst, src uintptr, bytes int) error {
	if err := r.check("copy", bytes, dst, src); err != nil || bytes == 0 || dst == src {
		return err
	}
	return r.do("cuMemcpyDtoDAsync", r.drv.sym.MemcpyDtoD, dst, src, uintptr(bytes), r.compute.handle)
}

// CopyInAsync copies from pinned host memory (see AllocatePinned) to the device
// on a stream of the caller's choice, and returns at once.
func (r *Runtime) CopyInAsync(s *Stream, dst uintptr, src []byte) error {
	if len(src) == 0 {
		return nil
	}
	return r.do("cuMemcpyHtoDAsync", r.drv.sym.MemcpyHtoD, dst, hostmem.Addr(src), uintptr(len(src)), s.handle)
}

// CopyOutAsync copies from the device to pinned host memory on a stream of the
// caller's choice, and returns at once: dst holds the data when the stream has
// come that far.
func (r *Runtime) CopyOutAsync(s *Stream, dst []byte, src uintptr) error {
	if len(dst) == 0 {
		return nil
	}
	return r.do("cuMemcpyDtoHAsync", r.drv.sym.MemcpyDtoH, hostmem.Addr(dst), src, uintptr(len(dst)), s.handle)
}

// hostAllocPortable is CU_MEMHOSTALLOC_PORTABLE: pinned for every context.
const hostAllocPortable = 1

// AllocatePinned returns page-locked host memory, which the device copies from
// and to without staging. It lies outside the Go heap.
func (r *Runtime) AllocatePinned(bytes int) ([]byte, error) {
	if bytes < 0 {
		return nil, r.argument("%d bytes", bytes)
	}
	if bytes == 0 {
		return nil, nil
	}
	p, err := r.get("cuMemHostAlloc", r.drv.sym.MemHostAlloc, uintptr(bytes), hostAllocPortable)
	if err != nil {
		return nil, err
	}
	return hostmem.Slice[byte](p, bytes), nil
}

// FreePinned gives pinned memory back.
func (r *Runtime) FreePinned(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	return r.do("cuMemFreeHost", r.drv.sym.MemFreeHost, hostmem.Addr(b))
}

// Fill implements [runtime.Runtime].
func (r *Runtime) Fill(dst uintptr, count int, dt dtype.DType, value float64) error {
	if err := r.check("fill", count, dst); err != nil {
		return err
	}
	word, err := dtype.FromFloat64(dt, value)
	if err != nil {
		return fmt.Errorf("cuda:%d: fill: %w: %w", r.index, runtime.ErrDType, err)
	}
	switch {
	case count == 0:
		return nil
	case dst%uintptr(dt.Size()) != 0:
		return r.argument("fill: %#x is no multiple of the %d bytes of %v", dst, dt.Size(), dt)
	}
	n, w := uintptr(count), uintptr(word)
	switch dt.Size() {
	case 1:
		return r.do("cuMemsetD8Async", r.drv.sym.MemsetD8, dst, w, n, r.compute.handle)
	case 2:
		return r.do("cuMemsetD16Async", r.drv.sym.MemsetD16, dst, w, n, r.compute.handle)
	case 4:
		return r.do("cuMemsetD32Async", r.drv.sym.MemsetD32, dst, w, n, r.compute.handle)
	}
	return r.launch(fillU64, count, uint64(dst), uint64(count), word)
}

// scaleKernels are the kernels of Scale.
var scaleKernels = map[dtype.DType]kernel{
	dtype.F64: scaleF64, dtype.F32: scaleF32, dtype.F16: scaleF16, dtype.BF16: scaleBF16,
}

// Scale multiplies count elements in place by s, computed in the type's own
// precision or float32, whichever is greater, and rounded once.
func (r *Runtime) Scale(x uintptr, count int, dt dtype.DType, s float32) error {
	if err := r.check("scale", count, x); err != nil {
		return err
	}
	k, ok := scaleKernels[dt]
	switch {
	case !ok:
		return fmt.Errorf("cuda:%d: %w: scale of %v", r.index, runtime.ErrUnsupported, dt)
	case x%uintptr(dt.Size()) != 0:
		return r.argument("scale: %#x is no multiple of the %d bytes of %v", x, dt.Size(), dt)
	}
	return r.launch(k, count, uint64(x), uint64(count), uint64(math.Float32bits(s)))
}

// check is what all operations on memory check: that the runtime can be used,
// the length (in bytes or elements) is not negative and, unless it is zero, no
// pointer is nil.
func (r *Runtime) check(what string, length int, pointers ...uintptr) error {
	if err := r.usable(); err != nil {
		return err
	}
	if length < 0 {
		return r.argument("%s: length %d", what, length)
	}
	for _, p := range pointers {
		if p == 0 && length > 0 {
			return r.argument("%s: nil pointer with length %d", what, length)
		}
	}
	return nil
}

// argument makes an error about an argument.
func (r *Runtime) argument(format string, args ...any) error {
	return fmt.Errorf("cuda:%d: %w: %s", r.index, runtime.ErrArgument, fmt.Sprintf(format, args...))
}

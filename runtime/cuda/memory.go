package cuda

import (
	"context"
	"fmt"
	goruntime "runtime"
	"sync"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// CopyIn implements [runtime.Runtime]. The driver stages pageable memory before the call returns, but not pinned
// memory, so CopyIn waits for the copy.
func (r *Runtime) CopyIn(dst uintptr, src []byte) error {
	if err := r.check("copy in", len(src), dst); err != nil || len(src) == 0 {
		return err
	}
	err := r.submitIn(dst, src, r.compute.handle)
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
	err := r.submitOut(dst, src, r.compute.handle)
	if err == nil {
		err = r.compute.Synchronize(context.Background())
	}
	goruntime.KeepAlive(dst)
	return err
}

func (r *Runtime) submitIn(dst uintptr, src []byte, stream uintptr) error {
	return r.do(r.drv.sym.MemcpyHtoD, dst, hostmem.Addr(src), uintptr(len(src)), stream)
}

func (r *Runtime) submitOut(dst []byte, src, stream uintptr) error {
	return r.do(r.drv.sym.MemcpyDtoH, hostmem.Addr(dst), src, uintptr(len(dst)), stream)
}

// Copy implements [runtime.Runtime].
func (r *Runtime) Copy(dst, src uintptr, bytes int) error {
	if err := r.check("copy", bytes, dst, src); err != nil || bytes == 0 || dst == src {
		return err
	}
	return r.do(r.drv.sym.MemcpyDtoD, dst, src, uintptr(bytes), r.compute.handle)
}

// CopyInAsync copies from host memory to the device on a stream of the caller's choice, such as
// [Runtime.CopyInStream]. If src is memory of AllocatePinned, it returns at once, and src may be written or freed once
// the stream has executed the copy.
//
// Other memory is staged by the driver, during the call or after it. It must not change until the copy is complete,
// and is kept from the garbage collector until then. Such a copy must not be captured in a graph
// ([runtime.ErrArgument]).
func (r *Runtime) CopyInAsync(s *Stream, dst uintptr, src []byte) error {
	stream, err := r.on(s)
	if err == nil {
		err = r.check("copy in", len(src), dst)
	}
	switch {
	case err != nil || len(src) == 0:
		return err
	case r.owned.isPinned(hostmem.Addr(src)):
		return r.submitIn(dst, src, stream)
	}
	return r.copyAsync(s, src, func() error { return r.submitIn(dst, src, stream) })
}

// CopyOutAsync copies from the device to host memory on a stream of the caller's choice, for example
// [Runtime.CopyOutStream]. If dst is memory of AllocatePinned, it returns at once, and dst holds the data once the
// stream has executed the copy. Other memory has the restrictions of [Runtime.CopyInAsync].
func (r *Runtime) CopyOutAsync(s *Stream, dst []byte, src uintptr) error {
	stream, err := r.on(s)
	if err == nil {
		err = r.check("copy out", len(dst), src)
	}
	switch {
	case err != nil || len(dst) == 0:
		return err
	case r.owned.isPinned(hostmem.Addr(dst)):
		return r.submitOut(dst, src, stream)
	}
	return r.copyAsync(s, dst, func() error { return r.submitOut(dst, src, stream) })
}

// CopyInStream returns a stream of the runtime for copies from the host that overlap with work of the compute stream;
// a GPU has separate copy engines for each direction. The caller orders it with the compute stream:
//
//	in.WaitFor(rt.Stream())            // dst's former content is no longer needed
//	err = rt.CopyInAsync(in, dst, src) // src from AllocatePinned
//	rt.Stream().WaitFor(in)            // before work that reads dst
//
// Memory fresh from Allocate needs the first line too, because work of its last owner may be in flight on the compute
// stream. Call Deallocate on memory that a copy uses only after the last line.
//
// The stream is made at the first call and lives as long as the runtime.
func (r *Runtime) CopyInStream() (*Stream, error) {
	return r.copyIn.get(r)
}

// CopyOutStream is the counterpart of [Runtime.CopyInStream] for copies to the
// host:
//
//	out.WaitFor(rt.Stream())             // after the work that writes src
//	err = rt.CopyOutAsync(out, dst, src) // dst from AllocatePinned
//	rt.Stream().WaitFor(out)             // before src is written again or freed
//	err = out.Synchronize(ctx)           // before the host reads dst
func (r *Runtime) CopyOutStream() (*Stream, error) {
	return r.copyOut.get(r)
}

// lazyStream is a stream of the runtime that is made at its first use.
type lazyStream struct {
	mu     sync.Mutex // held while the stream is made
	stream *Stream    // nil before the first use; guarded by mu
}

func (l *lazyStream) get(r *Runtime) (*Stream, error) {
	if err := r.usable(); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stream == nil {
		s, err := r.newStream(0, true)
		if err != nil {
			return nil, err
		}
		l.stream = s
	}
	return l.stream, nil
}

// hostAllocPortable is CU_MEMHOSTALLOC_PORTABLE: pinned for every context.
const hostAllocPortable = 1

// AllocatePinned returns page-locked host memory. The device copies from and to it without staging, and kernels access
// it at the same address. It is not on the Go heap, and is valid until FreePinned or Close, which reports it as a
// leak.
func (r *Runtime) AllocatePinned(bytes int) ([]byte, error) {
	if bytes < 0 {
		return nil, r.argument("%d bytes", bytes)
	}
	if bytes == 0 {
		return nil, nil
	}
	free := destructor{fn: r.drv.sym.MemFreeHost, bytes: bytes}
	p, err := r.create(r.drv.sym.MemHostAlloc, free, uintptr(bytes), hostAllocPortable)
	if err != nil {
		return nil, err
	}
	return hostmem.Slice[byte](p, bytes), nil
}

// FreePinned frees pinned memory: a slice that AllocatePinned returned, or a subslice with the same start. Copies from
// and to it must be complete.
func (r *Runtime) FreePinned(b []byte) error {
	if cap(b) == 0 {
		return nil
	}
	if !r.gate.enter() {
		return r.usable()
	}
	defer r.gate.leave()
	p := hostmem.Addr(b)
	if _, found := r.owned.get(p); !found {
		return fmt.Errorf("cuda:%d: free pinned memory at %#x: %w", r.index, p, runtime.ErrForeignPointer)
	}
	return r.destroy(p)
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
	n := uintptr(count)
	w := uintptr(word)
	switch dt.Size() {
	case 1:
		return r.do(r.drv.sym.MemsetD8, dst, w, n, r.compute.handle)
	case 2:
		return r.do(r.drv.sym.MemsetD16, dst, w, n, r.compute.handle)
	case 4:
		return r.do(r.drv.sym.MemsetD32, dst, w, n, r.compute.handle)
	}
	parameters := fillParameters{
		dst:   dst,
		n:     count,
		value: word,
	}
	return launch(r, fillU64, blocksOf(count), blocksPerSM, &parameters)
}

// check checks the preconditions of all operations on memory: the runtime is usable, the length (in bytes or elements)
// is not negative and, unless it is zero, no pointer is nil.
func (r *Runtime) check(op string, length int, pointers ...uintptr) error {
	if err := r.usable(); err != nil {
		return err
	}
	if length < 0 {
		return r.argument("%s: length %d", op, length)
	}
	for _, p := range pointers {
		if p == 0 && length > 0 {
			return r.argument("%s: nil pointer with length %d", op, length)
		}
	}
	return nil
}

// argument makes an error about an argument.
func (r *Runtime) argument(format string, args ...any) error {
	return fmt.Errorf("cuda:%d: %w: %s", r.index, runtime.ErrArgument, fmt.Sprintf(format, args...))
}

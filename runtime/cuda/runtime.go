// Package cuda is the [runtime.Runtime] of an NVIDIA GPU, on the CUDA driver API: it makes tensors, copies them and
// runs kernels.
//
// The driver library is opened with the first runtime, never linked. A program that contains this package starts on a
// machine without a GPU, where [Open] returns an error wrapping [runtime.ErrUnavailable]. It needs no toolkit either;
// the kernels are PTX that the driver compiles.
//
// A runtime uses the device's primary context, as do the CUDA runtime API and the frameworks on top of it, so
// pointers, streams and events may be passed back and forth as plain handles. With [WithContext] it uses another
// context.
//
// # How it is written
//
//   - driver.go: the driver's functions; status.go: its errors; context.go: how calls enter the context, and when they
//     may; object.go, gate.go: what Close destroys, and what it waits for
//   - runtime.go: a [Runtime] from Open to Close; device.go: GPUs
//   - allocate.go: memory, from package runtime/internal/pool; shared.go: memory that other processes map; memory.go,
//     keep.go, host_copy.go: copies; word.go: host memory that a stream writes
//   - stream.go, fork.go: streams, and runtimes on streams beside the first; graph.go, order.go: captured work, and
//     what its launches wait for; foreign.go: pointers of others
//   - module.go: programs of users; launch.go, parameters.go: this package's kernels of kernels/, and their arguments
//   - kernels.go, kernels_*.go: [kernel.Kernels], by file of kernels/; strided.go: strided copies
//   - timeouts.go: all times
package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/internal/window"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/pool"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Runtime is one GPU. It is safe for concurrent use.
type Runtime struct {
	drv     *driver              // of the process; never changed
	index   int                  // ordinal of the GPU
	device  uintptr              // CUdevice
	ctx     uintptr              // CUcontext
	lent    bool                 // the context belongs to the caller
	info    DeviceInfo           // the driver's description of it
	starts  bool                 // see StartsEarly
	memory  *allocationProp      // kind of memory in the pool
	pool    *pool.Pool           // of device memory; locks itself
	kernels [kernelCount]uintptr // functions by number; loaded by Open
	sparse  sparse               // kernels for sparse exchanges; locks itself
	compute *Stream              // stream of kernels and device copies
	copyIn  lazyStream           // stream of copies from the host
	copyOut lazyStream           // stream of copies to the host that callers wait for
	toHost  lazyStream           // stream of host copies

	gate   gate                  // counts calls
	graphs gate                  // counts captures and launches of graphs
	frees  gate                  // counts calls of CurrentToFree
	owned  owned                 // native objects that Close destroys; locks itself
	words  words                 // of NewWord; locks itself
	copies keptCopies            // copies from host memory that may be in flight; locks itself
	broken atomic.Pointer[error] // the sticky error of the context; nil while there is none

	// Functions of Background, for which Close waits.
	background struct {
		sync.Mutex
		sync.WaitGroup
		awaited bool // Close is waiting; guarded by the mutex
	}
	parent    *Runtime      // nil unless this is a fork
	order     *order        // of the context; nil before there is one
	hasGraphs atomic.Bool   // this runtime has captured
	forks     forks         // runtimes of one side stream each; locks itself
	closing   sync.Mutex    // held by Close
	closeTime time.Duration // limit of each wait in Close
	flushTime time.Duration // limit of a fence
}

var (
	_ runtime.Runtime      = (*Runtime)(nil)
	_ runtime.Freezer      = (*Runtime)(nil)
	_ kernel.Provider      = (*Runtime)(nil)
	_ runtime.StreamForker = (*Runtime)(nil)
	_ kernel.AsyncCopier   = (*Runtime)(nil)
	_ window.Opener        = (*Runtime)(nil)
)

// Option changes how Open makes a runtime.
type Option func(*options)

type options struct {
	adopt   bool    // stream is the compute stream; false makes one
	stream  uintptr // a CUstream; 0 is the legacy default stream
	context uintptr // a CUcontext; 0 is the primary one
	first   bool    // the compute stream has a higher priority
}

// WithContext makes the runtime use an existing CUcontext of the GPU instead of its primary one, for programs that
// make contexts with cuCtxCreate. The context must outlive the runtime, which neither destroys nor releases it. A
// context of another GPU is [runtime.ErrDevice]. Libraries on the CUDA runtime API, including NCCL, use the primary
// context: a program that uses them should too (cuDevicePrimaryCtxRetain).
func WithContext(handle uintptr) Option {
	return func(o *options) { o.context = handle }
}

// WithComputeStream makes the runtime order its work on an existing CUstream of its context, such as a framework's,
// instead of a new one. The stream must outlive the runtime; [Runtime.CheckStream] says which streams are allowed. The
// handle 0 is the legacy default stream.
func WithComputeStream(handle uintptr) Option {
	return func(o *options) {
		o.adopt = true
		o.stream = handle
	}
}

// Open returns a runtime of GPU number index. Several runtimes may be open on one GPU; each has its own stream and
// pool.
func Open(index int, opts ...Option) (*Runtime, error) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	n, err := Count()
	if err != nil {
		return nil, err
	}
	if index < 0 || index >= n {
		return nil, fmt.Errorf("cuda: %w: GPU %d of %d", runtime.ErrArgument, index, n)
	}
	d, err := open()
	if err != nil {
		return nil, err
	}
	r := &Runtime{
		drv:       d,
		index:     index,
		closeTime: closeTimeout,
		flushTime: flushTimeout,
	}
	r.sparse.rt = r
	if err := r.init(o, n); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// init acquires the resources that Close releases, in the order in which they are needed.
func (r *Runtime) init(o options, devices int) (err error) {
	if r.info, err = r.drv.describe(r.index, devices); err != nil {
		return err
	}
	if r.info.Major < oldestMajor {
		return fmt.Errorf("cuda:%d: %w: %s has compute capability %d.%d, %d.0 or newer is needed",
			r.index, runtime.ErrUnsupported, r.info.Name, r.info.Major, r.info.Minor, oldestMajor)
	}
	r.starts = r.info.Major >= 9 && r.drv.version() >= 12030 && r.drv.sym.LaunchKernelEx.Found()
	if r.device, err = r.drv.handle(r.index); err != nil {
		return err
	}
	if err := r.acquireContext(o.context); err != nil {
		return err
	}
	if err := r.prepareMemory(); err != nil {
		return err
	}
	r.pool = pool.New(pool.Config{
		Name:      fmt.Sprintf("cuda:%d", r.index),
		System:    deviceMemory{r},
		SlabBytes: slabBytes,
		PageBytes: pool.Granule,
	})
	if o.adopt {
		if err := r.CheckStream(o.stream); err != nil {
			return err
		}
		r.compute = r.WrapStream(o.stream)
	} else {
		priority := 0
		if o.first {
			if _, priority, err = r.StreamPriorities(); err != nil {
				return err
			}
		}
		if r.compute, err = r.newStream(priority, true); err != nil {
			return err
		}
	}
	return r.loadKernels("memory.ptx.gz", 0, kernelScaleF32)
}

// acquireContext uses the given context, or the primary one if it is 0.
func (r *Runtime) acquireContext(handle uintptr) error {
	if handle == 0 {
		ctx, err := r.drv.get(r.index, r.drv.sym.PrimaryCtxRetain, r.device)
		if err != nil {
			return err
		}
		r.ctx = uintptr(ctx)
		r.order = r.drv.orders.join(r.ctx)
		return nil
	}
	r.ctx = handle
	r.lent = true
	r.order = r.drv.orders.join(r.ctx)
	device, err := r.get(r.drv.sym.CtxGetDevice)
	if err == nil && uint32(device) != uint32(r.device) { // a CUdevice is an int
		err = fmt.Errorf("cuda:%d: %w: context %#x is one of device %d", r.index, runtime.ErrDevice, handle, int32(device))
	}
	return err
}

// oldestMajor is the compute capability of the kernels' PTX: the driver compiles it for that and any newer GPU.
const oldestMajor = 8

// Name implements [runtime.Runtime].
func (r *Runtime) Name() string {
	return r.info.Name
}

// Device implements [runtime.Runtime].
func (r *Runtime) Device() runtime.Device {
	return deviceOf(r.index)
}

// Info describes the GPU.
func (r *Runtime) Info() DeviceInfo { return r.info }

// Context returns the native CUcontext: the device's primary one, or the one of
// [WithContext].
func (r *Runtime) Context() uintptr { return r.ctx }

// Stream returns the compute stream. Its Close does nothing.
func (r *Runtime) Stream() *Stream { return r.compute }

// ComputeStream implements [runtime.Runtime].
func (r *Runtime) ComputeStream() uintptr {
	return r.compute.handle
}

// Synchronize implements [runtime.Runtime].
func (r *Runtime) Synchronize(ctx context.Context) error {
	if err := r.usable(); err != nil {
		return err
	}
	return r.compute.Synchronize(ctx)
}

// MemoryInfo returns the free and total bytes of the GPU, as the driver counts them: memory that this runtime's pool
// caches is not free.
func (r *Runtime) MemoryInfo() (free, total int64, err error) {
	out := r.drv.out()
	defer r.drv.release(out)
	err = r.manage(r.drv.sym.MemGetInfo, out.addr(0), out.addr(1))
	return int64(out[0]), int64(out[1]), err
}

// Background runs f on another goroutine, for which Close waits. Libraries on top of the runtime free their objects in
// it, with CurrentToFree.
func (r *Runtime) Background(f func()) {
	b := &r.background
	b.Lock()
	defer b.Unlock()
	if b.awaited {
		go f() // Close does not wait for it; its calls may fail
		return
	}
	b.Go(f)
}

// awaitBackground waits for the functions of Background.
func (r *Runtime) awaitBackground() error {
	b := &r.background
	b.Lock()
	b.awaited = true
	b.Unlock()
	done := make(chan struct{})
	go func() {
		b.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-time.After(r.closeTime):
		return fmt.Errorf("cuda:%d: closed while a library still frees its memory, for more than %v", r.index, r.closeTime)
	}
}

// Close implements [runtime.Runtime]. It waits for calls in flight and for the work of this runtime's streams. It
// destroys the remaining streams, events and graphs, whose own Close does nothing afterwards. Device and pinned memory
// that was not freed is reported as an error wrapping [runtime.ErrLeak].
//
// Each wait lasts 30 s at most. If work has not ended by then, Close reports it, and does not free memory that it may
// use. On a broken device Close frees as much as the driver permits; the error wraps [runtime.ErrBroken] and the
// cause.
//
// Close does not wait for work of others on the GPU, unless the driver does in the calls that free objects. A context
// of [WithContext] stays, as does the primary one while other code retains it.
func (r *Runtime) Close() error {
	r.closing.Lock()
	defer r.closing.Unlock()
	if r.gate.isShut() {
		return nil
	}
	if r.parent != nil {
		r.parent.forks.remove(r)
	}
	var err error
	for _, b := range r.forks.shut() { // forks that nobody has closed
		err = errors.Join(err, b.Close())
	}
	err = errors.Join(err, r.destroyGraphs(), r.awaitBackground())
	r.gate.shut()
	if r.ctx == 0 {
		return err // Open failed before there was a context
	}
	if pending := r.awaitWork(); pending != nil {
		return errors.Join(err, pending)
	}
	r.copies.mu.Lock()
	r.dropCopies()
	r.copies.mu.Unlock()
	err = errors.Join(err, r.releaseAll())
	return errors.Join(err, r.sound())
}

// destroyGraphs destroys the remaining graphs, for which libraries that free memory in the background may wait. The
// driver frees a running graph once it has ended.
func (r *Runtime) destroyGraphs() error {
	r.graphs.shut()
	exec := r.drv.sym.GraphExecDestroy
	_ = r.await(func() bool {
		return r.graphs.empty() && (len(r.owned.with(exec)) == 0 || r.idle())
	})
	if !r.graphs.empty() {
		return nil // a capture is in progress, and awaitWork reports it
	}
	var errs []error
	for _, handle := range r.owned.with(exec) {
		if d, found := r.owned.remove(handle); found {
			errs = append(errs, r.free(d.fn, handle))
		}
	}
	return errors.Join(errs...)
}

// awaitWork waits until no call is in flight and this runtime's streams are idle, and then for functions of
// Background.
func (r *Runtime) awaitWork() error {
	// Calls come first: a stream may not be queried while it is destroyed or captured.
	err := r.await(func() bool {
		return r.graphs.empty() && r.gate.empty() && r.idle()
	})
	if err != nil {
		return fmt.Errorf("cuda:%d: closed with work in flight that did not end within %v; its memory is not freed",
			r.index, r.closeTime)
	}
	r.frees.shut()
	if r.await(r.frees.empty) != nil {
		return fmt.Errorf("cuda:%d: closed while a library frees its memory, which did not end within %v; "+
			"nothing is freed", r.index, r.closeTime)
	}
	return nil
}

// await waits for done, for at most the limit of each wait in Close.
func (r *Runtime) await(done func() bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), r.closeTime)
	defer cancel()
	return poll.Until(ctx, func() (bool, error) { return done(), nil })
}

// idle reports whether this runtime's streams, and its copies on others, have no work left. Streams that cannot be
// queried, as on a broken device, count as idle.
func (r *Runtime) idle() bool {
	stream := r.drv.sym.StreamQuery
	event := r.drv.sym.EventQuery
	if r.compute != nil && r.pending(stream, r.compute.handle) {
		return false
	}
	r.copies.mu.Lock()
	defer r.copies.mu.Unlock()
	if r.copies.calls > 0 {
		return false
	}
	for _, c := range r.copies.list {
		if r.pending(event, c.done.handle) {
			return false
		}
	}
	r.owned.mu.Lock() // keeps streams from being destroyed
	defer r.owned.mu.Unlock()
	for handle, d := range r.owned.objects {
		if d.fn == r.drv.sym.StreamDestroy && r.pending(stream, handle) {
			return false
		}
	}
	return true
}

// pending queries whether a stream or an event has work in flight.
func (r *Runtime) pending(query dl.Func, handle uintptr) bool {
	previous, err := r.makeCurrent()
	if err != nil {
		return false
	}
	status := r.drv.manage(query, handle)
	r.putBack(previous)
	if sticky[status] {
		_ = r.fail(query, status)
	}
	return status == statusNotReady
}

// releaseAll destroys the runtime's objects, and releases its context if it is the primary one.
func (r *Runtime) releaseAll() error {
	var errs []error
	if r.pool != nil {
		errs = append(errs, r.sparse.release(r.pool), r.pool.Close())
	}
	pinned := 0
	bytes := 0
	for handle, d := range r.owned.drain() {
		errs = append(errs, r.undo(handle, d))
		if d.bytes > 0 {
			pinned++
			bytes += d.bytes
		}
	}
	if pinned > 0 {
		errs = append(errs, fmt.Errorf("cuda:%d: closed with %d pinned allocations of %d bytes in all: %w",
			r.index, pinned, bytes, runtime.ErrLeak))
	}
	r.drv.orders.leave(r)
	if !r.lent {
		errs = append(errs, r.free(r.drv.sym.PrimaryCtxRelease, r.device))
	}
	return errors.Join(errs...)
}

// Package cuda is the [runtime.Runtime] of NVIDIA GPUs, on the CUDA driver API.
//
// The driver library is opened when the first runtime is, never linked: a
// program that contains this package starts on a machine without a GPU, and
// [Open] there returns an error wrapping [runtime.ErrUnavailable]. No toolkit is
// needed either; the kernels are PTX that the driver compiles.
//
// A runtime uses the device's primary context, as the CUDA runtime API and the
// frameworks on top of it do, so pointers, streams and events may be passed
// back and forth as plain handles.
package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/internal/pool"
	"github.com/tutti-go/tutti/runtime"
)

// Runtime is one GPU. It is safe for concurrent use.
type Runtime struct {
	drv     *driver
	index   int
	device  uintptr // CUdevice
	ctx     uintptr // CUcontext, the primary one
	info    DeviceInfo
	compute *Stream
	kernels *kernels
	rdma    uint8 // network cards can read memory of this device
	pool    *pool.Pool

	background sync.WaitGroup

	closing sync.Mutex
	closed  atomic.Bool
	broken  atomic.Pointer[error]
}

var (
	_ runtime.Runtime = (*Runtime)(nil)
	_ runtime.Freezer = (*Runtime)(nil)
)

// Option changes how Open makes a runtime.
type Option func(*options)

type options struct {
	computeStream uintptr
}

// WithComputeStream makes the runtime order its work on an existing CUstream of
// the device's primary context, such as a framework's, instead of a new one.
func WithComputeStream(handle uintptr) Option {
	return func(o *options) { o.computeStream = handle }
}

// Open returns the runtime of GPU number index. Several runtimes may be open
// on one GPU; each has its own stream and pool.
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
	r := &Runtime{drv: d, index: index}
	if err := r.init(o, n); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// init acquires what Close gives back, in the order in which it is needed.
func (r *Runtime) init(o options, devices int) (err error) {
	if r.info, err = r.drv.describe(r.index, devices); err != nil {
		return err
	}
	if r.device, err = r.drv.handle(r.index); err != nil {
		return err
	}
	ctx, err := r.drv.get("cuDevicePrimaryCtxRetain", r.index, r.drv.sym.PrimaryCtxRetain, r.device)
	if err != nil {
		return err
	}
	r.ctx = uintptr(ctx)
	if err := r.prepareMemory(); err != nil {
		return err
	}
	r.pool = pool.New(pool.Config{
		Name:       fmt.Sprintf("cuda:%d", r.index),
		System:     deviceMemory{r},
		SlabBytes:  slabBytes,
		PageBytes:  pool.Granule,
		CacheLimit: -1,
	})
	if o.computeStream != 0 {
		r.compute = r.WrapStream(o.computeStream)
	} else if r.compute, err = r.NewStream(0); err != nil {
		return err
	}
	r.kernels, err = r.loadKernels()
	return err
}

// Name implements [runtime.Runtime].
func (r *Runtime) Name() string { return r.info.Name }

// Device implements [runtime.Runtime].
func (r *Runtime) Device() runtime.Device { return deviceOf(r.index) }

// Info describes the GPU.
func (r *Runtime) Info() DeviceInfo { return r.info }

// Context returns the native CUcontext, the device's primary one.
func (r *Runtime) Context() uintptr { return r.ctx }

// Stream returns the compute stream.
func (r *Runtime) Stream() *Stream { return r.compute }

// ComputeStream implements [runtime.Runtime].
func (r *Runtime) ComputeStream() uintptr { return r.compute.handle }

// Synchronize implements [runtime.Runtime].
func (r *Runtime) Synchronize(ctx context.Context) error {
	if err := r.usable(); err != nil {
		return err
	}
	return r.compute.Synchronize(ctx)
}

// MemoryInfo returns the free and total bytes of the GPU, as the driver sees
// them (memory cached in this runtime's pool is not free).
func (r *Runtime) MemoryInfo() (free, total int64, err error) {
	out := r.drv.out()
	defer r.drv.release(out)
	err = r.do("cuMemGetInfo", r.drv.sym.MemGetInfo, out.addr(0), out.addr(1))
	return int64(out[0]), int64(out[1]), err
}

// Background runs f on a goroutine of its own, which Close waits for: for
// libraries on top of the runtime that free things of theirs.
func (r *Runtime) Background(f func()) { r.background.Go(f) }

// backgroundTimeout bounds how long Close waits for such goroutines.
const backgroundTimeout = 30 * time.Second

func (r *Runtime) awaitBackground() error {
	done := make(chan struct{})
	go func() {
		r.background.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-time.After(backgroundTimeout):
		return fmt.Errorf("cuda:%d: closed while a library still frees its memory, for more than %v", r.index, backgroundTimeout)
	}
}

// Close implements [runtime.Runtime]. The primary context lives on while
// somebody else retains it.
func (r *Runtime) Close() error {
	r.closing.Lock()
	defer r.closing.Unlock()
	if r.closed.Load() {
		return nil
	}
	var errs []error
	if err := r.awaitBackground(); err != nil {
		errs = append(errs, err)
	}
	if r.compute != nil {
		errs = append(errs, r.compute.Synchronize(context.Background()))
	}
	if r.pool != nil {
		errs = append(errs, r.pool.Close())
	}
	if r.kernels != nil {
		for _, m := range r.kernels.modules {
			errs = append(errs, r.do("cuModuleUnload", r.drv.sym.ModuleUnload, m))
		}
	}
	if r.compute != nil {
		errs = append(errs, r.compute.Close())
	}
	r.closed.Store(true)
	if r.ctx != 0 {
		errs = append(errs, r.drv.check("cuDevicePrimaryCtxRelease", r.index, r.drv.sym.PrimaryCtxRelease.Call(r.device)))
	}
	return errors.Join(errs...)
}

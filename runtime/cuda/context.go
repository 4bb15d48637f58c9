package cuda

import (
	"fmt"
	goruntime "runtime"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/runtime"
)

// do makes a driver call with the device's primary context current.
//
// Contexts are current per OS thread and goroutines move between threads, so
// the goroutine is locked to its thread for the call. A context of somebody
// else that is current there (a framework's, whose goroutine holds the thread)
// is put back afterwards; on a thread that had none, ours stays, which makes
// the next call cheaper.
func (r *Runtime) do(call string, fn dl.Func, args ...uintptr) error {
	if err := r.usable(); err != nil {
		return err
	}
	previous, err := r.enter()
	if err != nil {
		return err
	}
	status := Status(fn.Call(args...))
	r.leave(previous)
	if status == statusSuccess {
		return nil
	}
	return r.fail(call, status)
}

// get is do for a call whose first parameter receives its result.
func (r *Runtime) get(call string, fn dl.Func, args ...uintptr) (uintptr, error) {
	if err := r.usable(); err != nil {
		return 0, err
	}
	previous, err := r.enter()
	if err != nil {
		return 0, err
	}
	value, err := r.drv.get(call, r.index, fn, args...)
	r.leave(previous)
	if err != nil {
		r.note(err)
	}
	return uintptr(value), err
}

// Current runs f, which makes calls of its own to libraries on top of CUDA, with
// the device's primary context current and the goroutine locked to its thread.
func (r *Runtime) Current(f func() error) error {
	if err := r.usable(); err != nil {
		return err
	}
	previous, err := r.enter()
	if err != nil {
		return err
	}
	defer r.leave(previous)
	return f()
}

// enter locks the goroutine to its thread and makes the context current there.
// It returns the context to put back, 0 if none.
func (r *Runtime) enter() (previous uintptr, err error) {
	goruntime.LockOSThread()
	out := r.drv.out()
	r.drv.sym.CtxGetCurrent.Call(out.addr(0))
	previous = uintptr(out[0])
	r.drv.release(out)
	if previous == r.ctx {
		return 0, nil
	}
	if status := Status(r.drv.sym.CtxSetCurrent.Call(r.ctx)); status != statusSuccess {
		goruntime.UnlockOSThread()
		return 0, r.fail("cuCtxSetCurrent", status)
	}
	return previous, nil
}

// leave undoes enter.
func (r *Runtime) leave(previous uintptr) {
	if previous != 0 {
		r.drv.sym.CtxSetCurrent.Call(previous)
	}
	goruntime.UnlockOSThread()
}

// usable reports why no call can be made any more, nil if one can.
func (r *Runtime) usable() error {
	if r.closed.Load() {
		return fmt.Errorf("cuda:%d: %w", r.index, runtime.ErrClosed)
	}
	if cause := r.broken.Load(); cause != nil {
		return fmt.Errorf("cuda:%d: %w: %w", r.index, runtime.ErrBroken, *cause)
	}
	return nil
}

// fail makes the error of a status and remembers a sticky one.
func (r *Runtime) fail(call string, status Status) error {
	err := r.drv.newError(call, r.index, status)
	r.note(err)
	return err
}

// note remembers the first error after which the context is unusable.
func (r *Runtime) note(err error) {
	if e, ok := err.(*Error); ok && e.Sticky {
		r.broken.CompareAndSwap(nil, &err)
	}
}

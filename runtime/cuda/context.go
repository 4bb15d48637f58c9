package cuda

import (
	"fmt"
	goruntime "runtime"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/runtime"
)

// do makes a driver call that submits work to a stream, with the runtime's context current.
//
// Contexts are current per OS thread and goroutines move between threads, so the goroutine is locked to its thread for
// the call. If another context is current there (a framework's, whose goroutine holds the thread), it is restored
// afterwards. On a thread without one, the runtime's context stays current, which makes the next call cheaper.
func (r *Runtime) do(fn dl.Func, args ...uintptr) error {
	previous, err := r.enter()
	if err != nil {
		return err
	}
	status := Status(fn.Int(args...))
	r.leave(previous)
	if status == statusSuccess {
		return nil
	}
	return r.fail(fn, status)
}

// manage is do for a call that submits nothing, which a capture may forbid.
func (r *Runtime) manage(fn dl.Func, args ...uintptr) error {
	previous, err := r.enter()
	if err != nil {
		return err
	}
	status := r.drv.manage(fn, args...)
	r.leave(previous)
	if status == statusSuccess {
		return nil
	}
	return r.fail(fn, status)
}

// get is manage for a call whose first parameter receives its result.
func (r *Runtime) get(fn dl.Func, args ...uintptr) (uintptr, error) {
	previous, err := r.enter()
	if err != nil {
		return 0, err
	}
	value, err := r.drv.get(r.index, fn, args...)
	r.leave(previous)
	if err != nil {
		r.note(err)
	}
	return uintptr(value), err
}

// Current runs f, which calls libraries on top of CUDA, with the runtime's context current and the goroutine locked to
// its thread, and then restores the previous context. Close waits for f. Calls of this runtime that f makes after
// Close has begun fail with [runtime.ErrClosed].
func (r *Runtime) Current(f func() error) error {
	previous, err := r.enter()
	if err != nil {
		return err
	}
	defer r.leave(previous)
	return f()
}

// CurrentToFree is Current for calls that free objects of libraries on top of CUDA. Such calls do not end a
// framework's capture. It also runs f on a broken device and while Close waits: a library may free the memory of
// several GPUs together, which needs the broken one too. Close waits for f. After Close has released the context,
// CurrentToFree does nothing.
func (r *Runtime) CurrentToFree(f func()) {
	if !r.frees.enter() {
		return
	}
	defer r.frees.leave()
	previous, err := r.makeCurrent()
	if err != nil {
		return
	}
	defer r.putBack(previous)
	r.drv.relaxed(f)
}

// enter begins a call: it keeps Close from releasing the context, locks the goroutine to its thread and makes the
// context current there. It returns the context to restore, 0 if none.
func (r *Runtime) enter() (previous uintptr, err error) {
	if !r.gate.enter() {
		return 0, r.usable()
	}
	if r.broken.Load() != nil {
		err = r.usable()
	} else {
		previous, err = r.makeCurrent()
	}
	if err != nil {
		r.gate.leave()
	}
	return previous, err
}

// leave reverts enter.
func (r *Runtime) leave(previous uintptr) {
	r.putBack(previous)
	r.gate.leave()
}

// makeCurrent is the part of enter that also works on a closed or broken runtime.
func (r *Runtime) makeCurrent() (previous uintptr, err error) {
	goruntime.LockOSThread()
	out := r.drv.out()
	r.drv.sym.CtxGetCurrent.Int(out.addr(0))
	previous = uintptr(out[0])
	r.drv.release(out)
	if previous == r.ctx {
		return 0, nil
	}
	if status := Status(r.drv.sym.CtxSetCurrent.Int(r.ctx)); status != statusSuccess {
		goruntime.UnlockOSThread()
		return 0, r.fail(r.drv.sym.CtxSetCurrent, status)
	}
	return previous, nil
}

// putBack reverts makeCurrent.
func (r *Runtime) putBack(previous uintptr) {
	if previous != 0 {
		r.drv.sym.CtxSetCurrent.Int(previous)
	}
	goruntime.UnlockOSThread()
}

// free makes a call that frees something. Unlike do it also works while Close runs. It also tries on a broken device,
// where the driver refuses most calls; such a failure is not reported, since the broken device is reported already.
func (r *Runtime) free(fn dl.Func, args ...uintptr) error {
	previous, err := r.makeCurrent()
	if err == nil {
		status := r.drv.manage(fn, args...)
		r.putBack(previous)
		if status != statusSuccess {
			err = r.fail(fn, status)
		}
	}
	if r.broken.Load() != nil {
		return nil
	}
	return err
}

// usable returns the reason why no call can be made, nil if calls can.
func (r *Runtime) usable() error {
	if r.gate.isShut() {
		return r.errClosed()
	}
	return r.sound()
}

func (r *Runtime) errClosed() error {
	return fmt.Errorf("cuda:%d: %w", r.index, runtime.ErrClosed)
}

// sound returns the fault that broke the device, nil if there was none.
func (r *Runtime) sound() error {
	if cause := r.broken.Load(); cause != nil {
		return fmt.Errorf("cuda:%d: %w: %w", r.index, runtime.ErrBroken, *cause)
	}
	return nil
}

// fail makes the error of a status and records a sticky one.
func (r *Runtime) fail(fn dl.Func, status Status) error {
	err := r.drv.newError(fn, r.index, status)
	r.note(err)
	return err
}

// note records the first error after which the context is unusable.
func (r *Runtime) note(err error) {
	if e, ok := err.(*Error); ok && e.Sticky {
		r.broken.CompareAndSwap(nil, &err)
	}
}

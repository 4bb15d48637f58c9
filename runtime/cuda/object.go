package cuda

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/pool"
)

// destructor is the call that destroys a native object.
type destructor struct {
	fn    dl.Func // of the driver
	bytes int     // of pinned memory
	// For shared memory, which takes several calls to free: handle and size.
	memory uintptr
	size   int // bytes; 0 for other objects
}

// undo destroys a native object.
func (r *Runtime) undo(handle uintptr, d destructor) error {
	if d.memory != 0 {
		return deviceMemory{r}.Unmap(pool.Mapping{
			Addr:   handle,
			Handle: d.memory,
			Bytes:  d.size,
		})
	}
	return r.free(d.fn, handle)
}

// owned are the native objects (streams, events, graphs, modules, pinned and shared memory) that a runtime made and
// nobody has destroyed yet. Close destroys them: they belong to the context and would otherwise live on while a
// framework or NCCL retains it.
type owned struct {
	mu      sync.Mutex             // not held during driver calls, except in idle
	objects map[uintptr]destructor // by handle
	pinned  []uintptr              // handles of pinned memory

	// An object in use outlives its removal: the last use destroys it.
	uses    map[uintptr]int        // by handle; none is 0
	removed map[uintptr]destructor // while in use
}

func (o *owned) add(handle uintptr, d destructor) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.objects == nil {
		o.objects = make(map[uintptr]destructor)
	}
	o.objects[handle] = d
	if d.bytes > 0 {
		o.pinned = append(o.pinned, handle)
	}
}

// remove removes an object. It is found only once, and not if its last use destroys it.
func (o *owned) remove(handle uintptr) (d destructor, found bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	d, found = o.objects[handle]
	delete(o.objects, handle)
	if d.bytes > 0 {
		o.pinned = slices.DeleteFunc(o.pinned, func(p uintptr) bool { return p == handle })
	}
	if found && o.uses[handle] > 0 {
		o.removed[handle] = d
		return destructor{}, false
	}
	return d, found
}

// use keeps an object from being destroyed until endUse. It returns false if the object is gone.
func (o *owned) use(handle uintptr) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, found := o.objects[handle]; !found {
		return false
	}
	if o.uses == nil {
		o.uses = map[uintptr]int{}
		o.removed = map[uintptr]destructor{}
	}
	o.uses[handle]++
	return true
}

// endUse ends a use. If the object was removed in the meantime, it returns what the caller must destroy.
func (o *owned) endUse(handle uintptr) (d destructor, last bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.uses[handle]--
	if o.uses[handle] > 0 {
		return destructor{}, false
	}
	delete(o.uses, handle)
	d, last = o.removed[handle]
	delete(o.removed, handle)
	return d, last
}

func (o *owned) get(handle uintptr) (d destructor, found bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	d, found = o.objects[handle]
	return d, found
}

// isPinned reports whether an address lies in pinned memory.
func (o *owned) isPinned(p uintptr) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, start := range o.pinned {
		if p-start < uintptr(o.objects[start].bytes) {
			return true
		}
	}
	return false
}

// with returns the objects that fn destroys.
func (o *owned) with(fn dl.Func) (handles []uintptr) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for h, d := range o.objects {
		if d.fn == fn {
			handles = append(handles, h)
		}
	}
	return handles
}

// drain removes all objects.
func (o *owned) drain() map[uintptr]destructor {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.objects
	o.objects = nil
	o.pinned = nil
	return all
}

// create makes a call whose first parameter receives a new object, which d destroys.
func (r *Runtime) create(fn dl.Func, d destructor, args ...uintptr) (uintptr, error) {
	// Close must not run between the call and the record of its result.
	if !r.gate.enter() {
		return 0, r.usable()
	}
	defer r.gate.leave()
	handle, err := r.get(fn, args...)
	if err == nil {
		r.owned.add(handle, d)
	}
	return handle, err
}

// destroy destroys an object that this runtime made. Objects of others stay, and objects that Close destroyed are gone
// already.
func (r *Runtime) destroy(handle uintptr) error {
	if !r.gate.enter() {
		return nil
	}
	defer r.gate.leave()
	d, found := r.owned.remove(handle)
	if !found {
		return nil
	}
	if err := r.undo(handle, d); err != nil {
		return err
	}
	return r.sound()
}

// object is the common part of streams, events and graphs.
type object struct {
	rt     *Runtime    // its owner
	handle uintptr     // the driver's
	kept   bool        // Close does nothing
	closed atomic.Bool // Close was called
}

// use returns the native handle, unless the object or its runtime was closed: the driver does not recognize the handle
// of a destroyed object.
func (o *object) use(kind string) (uintptr, error) {
	switch {
	case o.rt.gate.isShut():
		return 0, o.rt.usable()
	case o.closed.Load():
		return 0, o.rt.argument("%s was closed", kind)
	}
	return o.handle, nil
}

func (o *object) close() error {
	if o.kept || o.closed.Swap(true) {
		return nil
	}
	return o.rt.destroy(o.handle)
}

// on returns the native handle of a stream of this GPU.
func (r *Runtime) on(s *Stream) (uintptr, error) {
	switch {
	case s == nil:
		return 0, r.argument("nil stream")
	case s.rt.index != r.index:
		return 0, fmt.Errorf("cuda:%d: %w: stream of cuda:%d", r.index, runtime.ErrDevice, s.rt.index)
	}
	return s.use("stream")
}

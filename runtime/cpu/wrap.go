package cpu

import (
	"fmt"
	goruntime "runtime"
	"sync"
	"unsafe"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// Wrap makes a tensor of a slice, without copying it: changes to one change the other. No shape makes a vector; any
// other must have as many elements as data ([runtime.ErrShape]). rt is a [Runtime]: memory of another one, such as a
// GPU's, cannot be a slice ([runtime.ErrDevice]), and [runtime.FromSlice] copies to it.
//
// The slice stays where it is, and reachable, until the tensor is freed: it is
// pinned, and one that the compiler would put on a stack is put on the heap. A
// tensor that the program forgets keeps its slice until Close, which reports it
// as [runtime.ErrLeak].
func Wrap[T dtype.Element](rt runtime.Runtime, data []T, shape ...int) (*runtime.Tensor, error) {
	return wrap(rt, data, dtype.Of[T](), len(data), shape)
}

// WrapBytes is [Wrap] for elements of a type that is known at run time: data
// holds them in the machine's byte order, aligned to their size
// ([runtime.ErrArgument]).
func WrapBytes(rt runtime.Runtime, data []byte, dt dtype.DType, shape ...int) (*runtime.Tensor, error) {
	n := 0
	if dt.Valid() {
		n = len(data) / dt.Size()
		if n*dt.Size() != len(data) {
			return nil, fmt.Errorf("cpu: wrap %d bytes as %s: %w", len(data), dt, runtime.ErrShape)
		}
	}
	return wrap(rt, data, dt, n, shape)
}

func wrap[T any](owner runtime.Runtime, data []T, dt dtype.DType, n int, shape []int) (*runtime.Tensor, error) {
	rt, ok := owner.(*Runtime)
	if owner == nil || ok && rt == nil {
		return nil, fmt.Errorf("cpu: wrap: no runtime: %w", runtime.ErrArgument)
	}
	if !ok {
		return nil, fmt.Errorf("cpu: wrap a slice in memory of %v: %w; FromSlice copies it there",
			owner.Device(), runtime.ErrDevice)
	}
	if rt.pool.Closed() {
		return nil, errClosed("wrap")
	}
	if len(shape) == 0 {
		shape = []int{n}
	}
	p := new(goruntime.Pinner)
	var addr uintptr
	if n > 0 {
		p.Pin(unsafe.SliceData(data))
		addr = hostmem.Addr(data)
	}
	t, err := runtime.Wrap(rt, addr, dt, shape, nil, func() { unpin(p) })
	if err == nil && t.Len() != n {
		err = fmt.Errorf("cpu: wrap %d elements as %v: %w", n, t, runtime.ErrShape)
	}
	if err != nil {
		p.Unpin()
		return nil, err
	}
	pins.Lock()
	defer pins.Unlock()
	pins.runtimes[p] = rt
	return t, nil
}

// Slice returns the elements of a contiguous tensor in host memory, of any runtime, without copying them. T must be
// the Go type of its dtype ([runtime.ErrDType]). The slice is valid until the tensor is freed, or, if the tensor
// wraps a slice, as long as that slice is.
//
// A Go bool has to be 0 or 1, while any byte but 0 is true in a tensor: in a tensor of bools, Slice sets those bytes
// to 1.
func Slice[T dtype.Element](t *runtime.Tensor) ([]T, error) {
	if t == nil {
		return nil, fmt.Errorf("cpu: slice of a nil tensor: %w", runtime.ErrArgument)
	}
	p, err := t.Ptr()
	switch {
	case err != nil:
		return nil, err
	case t.Device().Kind != runtime.CPU:
		return nil, fmt.Errorf("cpu: slice of %v: %w", t, runtime.ErrDevice)
	case dtype.Of[T]() != t.DType():
		return nil, fmt.Errorf("cpu: slice of %s of %v: %w", dtype.Of[T](), t, runtime.ErrDType)
	case !t.IsContiguous():
		return nil, fmt.Errorf("cpu: slice of %v: %w", t, runtime.ErrNotContiguous)
	}
	if t.DType() == dtype.Bool {
		for i, b := range hostmem.Slice[byte](p, t.Len()) {
			if b > 1 {
				hostmem.Slice[byte](p, t.Len())[i] = 1
			}
		}
	}
	return hostmem.Slice[T](p, t.Len()), nil
}

// pins are the slices of tensors that are not freed. They are kept here, not by
// the tensors, because the address of a forgotten tensor may still be in use, and
// because Go ends a program that forgets a Pinner.
var pins = struct {
	sync.Mutex
	runtimes map[*goruntime.Pinner]*Runtime // guarded by the mutex
}{runtimes: make(map[*goruntime.Pinner]*Runtime)}

// unpin lets go of a slice, unless Close did.
func unpin(p *goruntime.Pinner) {
	pins.Lock()
	defer pins.Unlock()
	if _, ok := pins.runtimes[p]; ok {
		p.Unpin()
		delete(pins.runtimes, p)
	}
}

// unpinAll lets go of all slices of a runtime.
func (rt *Runtime) unpinAll() error {
	pins.Lock()
	defer pins.Unlock()
	n := 0
	for p, owner := range pins.runtimes {
		if owner == rt {
			p.Unpin()
			delete(pins.runtimes, p)
			n++
		}
	}
	if n > 0 {
		return fmt.Errorf("cpu: close: %d wrapped slices: %w", n, runtime.ErrLeak)
	}
	return nil
}

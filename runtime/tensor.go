package runtime

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/tutti-go/tutti/dtype"
)

// Tensor is an n-dimensional array in the memory of a [Runtime]: a pointer, an
// element type, a shape and strides (both in elements, row-major by default).
// A tensor of rank 0 is a scalar of one element; a dimension of size 0 makes a
// tensor empty, which is legal everywhere.
//
// A tensor either owns its memory ([New], [FromSlice], [Tensor.Contiguous] and
// the like) or wraps memory of somebody else ([Wrap]), or it is a view of
// another tensor (Slice, Index, Transpose, Permute, Reshape), which shares its
// memory. Views of views refer to the one tensor at their base.
//
// Free releases it. The memory of an owning tensor goes back to the runtime, and the views of it are then freed too;
// freeing a view ends only the view; wrapped memory stays with its owner, who is told. All use after that is
// [ErrFreed]. Nothing frees a tensor that the program forgets, because its address may still be in use (in a captured
// graph, for instance): it shows in [Stats] and at Close.
//
// The methods may be called from any goroutine. The caller must serialize methods that touch the same elements, and
// Free with any other method.
type Tensor struct {
	memory *memory     // in which it lies
	ptr    uintptr     // of the first element; 0 if there is none
	dt     dtype.DType // type of its elements
	layout layout      // of its elements
	view   bool        // of another tensor, and does not free the memory
	freed  atomic.Bool // of a view; a base looks at its memory
}

// memory is what a base tensor and all its views share.
type memory struct {
	rt      Runtime     // whose memory it is
	ptr     uintptr     // where it begins; 0 if it is empty
	owned   bool        // Free gives it back to rt
	release func()      // of wrapped memory; nil if its owner is not told
	freed   atomic.Bool // set once, by the first Free
}

// New allocates a tensor with undefined content; no shape makes a scalar.
func New(rt Runtime, dt dtype.DType, shape ...int) (*Tensor, error) {
	if err := checkNew(rt, dt); err != nil {
		return nil, err
	}
	l, err := contiguousLayout(shape, dt.Size())
	if err != nil {
		return nil, err
	}
	ptr, err := rt.Allocate(l.len * dt.Size())
	if err != nil {
		return nil, fmt.Errorf("runtime: new %s tensor of shape %v: %w", dt, shape, err)
	}
	return &Tensor{
		memory: &memory{rt: rt, ptr: ptr, owned: true},
		ptr:    ptr,
		dt:     dt,
		layout: l,
	}, nil
}

// Wrap makes a tensor of memory that belongs to somebody else, without copying
// it. ptr is the address of the first element, on the device of rt and aligned
// to the element size; it may be 0 if the tensor is empty. Strides are in
// elements, may be zero or negative, and nil means contiguous.
//
// The memory must stay valid until Free, which calls release once, if it is not nil: it tells the owner that the
// tensor no longer needs the memory. Until then the tensor keeps reachable what release refers to. An address is not
// a reference. Go memory is wrapped by runtime/cpu's Wrap, because a slice may lie on a stack, which moves, or in
// memory that the garbage collector frees.
func Wrap(rt Runtime, ptr uintptr, dt dtype.DType, shape, strides []int, release func()) (*Tensor, error) {
	if err := checkNew(rt, dt); err != nil {
		return nil, err
	}
	l, err := contiguousLayout(shape, dt.Size())
	if strides != nil {
		l, err = stridedLayout(shape, strides, dt.Size())
	}
	if err != nil {
		return nil, err
	}
	if ptr == 0 && l.len > 0 {
		return nil, fmt.Errorf("runtime: wrap %d elements at a nil pointer: %w", l.len, ErrArgument)
	}
	if ptr%uintptr(dt.Size()) != 0 {
		return nil, fmt.Errorf("runtime: wrap %s at %#x: not aligned to %d bytes: %w", dt, ptr, dt.Size(), ErrArgument)
	}
	return &Tensor{
		memory: &memory{rt: rt, ptr: ptr, release: release},
		ptr:    ptr,
		dt:     dt,
		layout: l,
	}, nil
}

func checkNew(rt Runtime, dt dtype.DType) error {
	if rt == nil {
		return fmt.Errorf("runtime: tensor without a runtime: %w", ErrArgument)
	}
	if !dt.Valid() {
		return fmt.Errorf("runtime: tensor of DType(%d): %w", uint8(dt), ErrDType)
	}
	return nil
}

// Ptr returns the address of the first element; 0 if the tensor is empty and
// owns no memory. It fails with [ErrFreed] after Free.
func (t *Tensor) Ptr() (uintptr, error) {
	if err := t.check(); err != nil {
		return 0, err
	}
	return t.ptr, nil
}

// DType returns the element type.
func (t *Tensor) DType() dtype.DType {
	return t.dt
}

// Shape returns the size of every dimension, in a slice that the caller owns.
func (t *Tensor) Shape() []int {
	return slices.Clone(t.layout.shape)
}

// Strides returns how many elements apart neighbours along each dimension are, in a slice that the caller owns.
func (t *Tensor) Strides() []int {
	return slices.Clone(t.layout.strides)
}

// Rank returns the number of dimensions, 0 for a scalar.
func (t *Tensor) Rank() int {
	return len(t.layout.shape)
}

// Len returns the number of elements: the product of the shape.
func (t *Tensor) Len() int {
	return t.layout.len
}

// Bytes returns the size of the elements without gaps: Len times element size.
func (t *Tensor) Bytes() int {
	return t.layout.len * t.dt.Size()
}

// Runtime returns the runtime whose memory the tensor lies in.
func (t *Tensor) Runtime() Runtime {
	return t.memory.rt
}

// Device returns the device of the runtime.
func (t *Tensor) Device() Device {
	return t.memory.rt.Device()
}

// IsContiguous reports whether the elements lie in row-major order without
// gaps, from Ptr on, Bytes bytes long.
func (t *Tensor) IsContiguous() bool {
	return t.layout.contiguous()
}

// isFreed reports whether the tensor, or the one it is a view of, was freed.
func (t *Tensor) isFreed() bool {
	return t.freed.Load() || t.memory.freed.Load()
}

// Free ends the use of the tensor as the type's comment says. Freeing again, even from several goroutines at once, or
// freeing nil, does nothing. Code that frees several tensors need not know which of them were made.
func (t *Tensor) Free() error {
	if t == nil {
		return nil
	}
	if t.view {
		t.freed.Store(true)
		return nil
	}
	m := t.memory
	if m.freed.Swap(true) {
		return nil
	}
	if !m.owned {
		if m.release != nil {
			m.release()
			m.release = nil // what it refers to is the garbage collector's now
		}
		return nil
	}
	if err := m.rt.Deallocate(m.ptr); err != nil {
		return fmt.Errorf("runtime: free %v: %w", t, err)
	}
	return nil
}

// String describes the tensor without its data, as in "f32[2 3] on cpu:0".
func (t *Tensor) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s%v on %s", t.dt, t.layout.shape, t.Device())
	if !t.IsContiguous() {
		fmt.Fprintf(&b, " with strides %v", t.layout.strides)
	}
	if t.isFreed() {
		b.WriteString(" (freed)")
	}
	return b.String()
}

func (t *Tensor) check() error {
	if t == nil {
		return fmt.Errorf("runtime: nil tensor: %w", ErrArgument)
	}
	if t.isFreed() {
		return fmt.Errorf("runtime: %v: %w", t, ErrFreed)
	}
	return nil
}

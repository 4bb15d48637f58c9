package runtime

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// Contiguous returns a contiguous tensor with the same elements: a view of t if
// t is contiguous, an owning copy otherwise. Either way the result can be freed
// on its own.
func (t *Tensor) Contiguous() (*Tensor, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	if t.IsContiguous() {
		return t.viewOf(t.layout, 0), nil
	}
	return t.clone()
}

// clone returns an owning, contiguous copy.
func (t *Tensor) clone() (*Tensor, error) {
	c, err := New(t.memory.rt, t.dt, t.layout.shape...)
	if err != nil {
		return nil, err
	}
	if err := c.copyElements(t); err != nil {
		return nil, errors.Join(err, c.Free())
	}
	return c, nil
}

// CopyFrom copies the elements of src, a tensor of the same dtype, shape and
// device; layouts may differ and memory may overlap.
func (t *Tensor) CopyFrom(src *Tensor) error {
	if err := errors.Join(t.check(), src.check()); err != nil {
		return err
	}
	switch {
	case t.Device() != src.Device():
		return fmt.Errorf("runtime: copy %v from %v: %w", t, src, ErrDevice)
	case t.dt != src.dt:
		return fmt.Errorf("runtime: copy %v from %v: %w", t, src, ErrDType)
	case !slices.Equal(t.layout.shape, src.layout.shape):
		return fmt.Errorf("runtime: copy %v from %v: %w", t, src, ErrShape)
	case !t.overlaps(src):
		return t.copyElements(src)
	case t.ptr == src.ptr && slices.Equal(t.layout.strides, src.layout.strides):
		return nil
	}
	c, err := src.clone()
	if err != nil {
		return err
	}
	return errors.Join(t.copyElements(c), c.Free())
}

// copyElements copies between tensors known to fit and not to overlap.
func (t *Tensor) copyElements(src *Tensor) error {
	if t.Len() == 0 {
		return nil
	}
	if t.IsContiguous() && src.IsContiguous() {
		return t.memory.rt.Copy(t.ptr, src.ptr, t.Bytes())
	}
	return t.memory.rt.CopyStrided(t.ptr, t.layout.strides, src.ptr, src.layout.strides,
		t.layout.shape, t.dt.Size())
}

// overlaps reports whether the ranges of addresses that the two tensors span
// have bytes in common.
func (t *Tensor) overlaps(o *Tensor) bool {
	if t.Len() == 0 || o.Len() == 0 {
		return false
	}
	start, end := t.span()
	oStart, oEnd := o.span()
	return start < oEnd && oStart < end
}

func (t *Tensor) span() (start, end uintptr) {
	first, last := t.layout.extent()
	size := t.dt.Size()
	return t.ptr + uintptr(first*size), t.ptr + uintptr((last+1)*size)
}

// Fill stores value, rounded to the element type as [dtype.FromFloat64] does,
// in every element.
func (t *Tensor) Fill(value float64) error {
	if err := t.check(); err != nil {
		return err
	}
	if t.Len() == 0 {
		return nil
	}
	rt := t.memory.rt
	if t.IsContiguous() {
		return rt.Fill(t.ptr, t.Len(), t.dt, value)
	}
	scalar, err := New(rt, t.dt)
	if err != nil {
		return err
	}
	if err := scalar.Fill(value); err != nil {
		return errors.Join(err, scalar.Free())
	}
	repeat := make([]int, t.Rank())
	err = rt.CopyStrided(t.ptr, t.layout.strides, scalar.ptr, repeat, t.layout.shape, t.dt.Size())
	return errors.Join(err, scalar.Free())
}

// FromSlice allocates a tensor and copies data into it, in row-major order. No
// shape makes a vector of len(data) elements; any other must have as many
// elements ([ErrShape]).
func FromSlice[T dtype.Element](rt Runtime, data []T, shape ...int) (*Tensor, error) {
	if len(shape) == 0 {
		shape = []int{len(data)}
	}
	t, err := New(rt, dtype.Of[T](), shape...)
	if err != nil {
		return nil, err
	}
	if err := CopyIn(t, data); err != nil {
		return nil, errors.Join(err, t.Free())
	}
	return t, nil
}

// ToSlice returns the elements of a tensor, in row-major order. T must be the
// Go type of the tensor's dtype ([ErrDType]).
func ToSlice[T dtype.Element](t *Tensor) ([]T, error) {
	if err := checkHost[T](t, -1); err != nil {
		return nil, err
	}
	data := make([]T, t.Len())
	return data, CopyOut(data, t)
}

// CopyIn copies host data to a tensor, in row-major order: exactly as many
// elements as it has ([ErrShape]), of its element type ([ErrDType]).
func CopyIn[T dtype.Element](t *Tensor, data []T) error {
	if err := checkHost[T](t, len(data)); err != nil || t.Len() == 0 {
		return err
	}
	if t.IsContiguous() {
		return t.memory.rt.CopyIn(t.ptr, hostmem.Bytes(data))
	}
	c, err := New(t.memory.rt, t.dt, t.layout.shape...)
	if err != nil {
		return err
	}
	if err := CopyIn(c, data); err != nil {
		return errors.Join(err, c.Free())
	}
	return errors.Join(t.copyElements(c), c.Free())
}

// CopyOut copies a tensor to host memory, in row-major order: exactly as many
// elements as it has ([ErrShape]), of its element type ([ErrDType]).
func CopyOut[T dtype.Element](data []T, t *Tensor) error {
	if err := checkHost[T](t, len(data)); err != nil || t.Len() == 0 {
		return err
	}
	c, err := t.Contiguous()
	if err != nil {
		return err
	}
	bytes := hostmem.Bytes(data)
	err = t.memory.rt.CopyOut(bytes, c.ptr)
	if t.dt == dtype.Bool {
		// Any byte but 0 is true on a device; a Go bool has to be 0 or 1.
		for i, b := range bytes {
			if b != 0 {
				bytes[i] = 1
			}
		}
	}
	return errors.Join(err, c.Free())
}

// checkHost checks a tensor against host data of n elements, -1 for any number.
func checkHost[T dtype.Element](t *Tensor, n int) error {
	if err := t.check(); err != nil {
		return err
	}
	if dt := dtype.Of[T](); dt != t.dt {
		return fmt.Errorf("runtime: %v and %s host data: %w", t, dt, ErrDType)
	}
	if n >= 0 && n != t.Len() {
		return fmt.Errorf("runtime: %v has %d elements, host data has %d: %w", t, t.Len(), n, ErrShape)
	}
	return nil
}

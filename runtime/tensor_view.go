package runtime

import "fmt"

// Slice returns a view of the range from ≤ i < to along one dimension.
func (t *Tensor) Slice(dim, from, to int) (*Tensor, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	l, offset, err := t.layout.slice(dim, from, to)
	if err != nil {
		return nil, err
	}
	return t.viewOf(l, offset), nil
}

// Index returns a view of the elements with index i along one dimension. The view lacks this dimension.
func (t *Tensor) Index(dim, i int) (*Tensor, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	if err := t.layout.checkDim(dim); err != nil {
		return nil, err
	}
	size := t.layout.shape[dim]
	if i < 0 || i >= size {
		return nil, fmt.Errorf("runtime: index %d of dimension %d of size %d: %w", i, dim, size, ErrArgument)
	}
	l, offset, err := t.layout.slice(dim, i, i+1)
	if err != nil {
		return nil, err
	}
	return t.viewOf(l.drop(dim), offset), nil
}

// Permute returns a view with the dimensions in another order: its dimension i
// is the dimension dims[i] of t.
func (t *Tensor) Permute(dims ...int) (*Tensor, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	l, err := t.layout.permute(dims)
	if err != nil {
		return nil, err
	}
	return t.viewOf(l, 0), nil
}

// Transpose returns a view with two dimensions exchanged.
func (t *Tensor) Transpose(dim0, dim1 int) (*Tensor, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	dims := make([]int, t.Rank())
	for i := range dims {
		dims[i] = i
	}
	for _, dim := range []int{dim0, dim1} {
		if err := t.layout.checkDim(dim); err != nil {
			return nil, err
		}
	}
	dims[dim0] = dim1
	dims[dim1] = dim0
	return t.Permute(dims...)
}

// Reshape returns a view of the same elements, in row-major order, with
// another shape of as many elements. The tensor must be contiguous
// ([ErrNotContiguous]); take Contiguous of one that is not.
func (t *Tensor) Reshape(shape ...int) (*Tensor, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	l, err := contiguousLayout(shape, t.dt.Size())
	if err != nil {
		return nil, err
	}
	if l.len != t.layout.len {
		return nil, fmt.Errorf("runtime: reshape %v to %v: %d elements to %d: %w",
			t, shape, t.layout.len, l.len, ErrShape)
	}
	if !t.IsContiguous() {
		return nil, fmt.Errorf("runtime: reshape %v to %v: %w", t, shape, ErrNotContiguous)
	}
	return t.viewOf(l, 0), nil
}

// viewOf makes a view whose first element is offset elements after t's.
func (t *Tensor) viewOf(l layout, offset int) *Tensor {
	return &Tensor{
		memory: t.memory,
		ptr:    t.ptr + uintptr(offset*t.dt.Size()),
		dt:     t.dt,
		layout: l,
		view:   true,
	}
}

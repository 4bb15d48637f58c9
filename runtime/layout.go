package runtime

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
)

// layout says where the elements of an array lie: element (i, j, …) is
// i*strides[0] + j*strides[1] + … elements away from the first.
type layout struct {
	shape   []int // by dimension
	strides []int // in elements, by dimension
	len     int   // number of elements
}

// contiguousLayout is the row-major layout of a shape, without gaps. elemSize
// is needed to refuse arrays whose size in bytes overflows.
func contiguousLayout(shape []int, elemSize int) (layout, error) {
	l := layout{
		shape:   slices.Clone(shape),
		strides: make([]int, len(shape)),
		len:     1,
	}
	// A dimension of size 0 counts as 1 here, so that the strides of an empty
	// array cannot overflow either.
	extent := elemSize
	for i, d := range slices.Backward(shape) {
		if d < 0 {
			return layout{}, fmt.Errorf("runtime: shape %v: negative dimension %d: %w", shape, i, ErrShape)
		}
		l.strides[i] = extent / elemSize
		l.len *= d
		high, low := bits.Mul64(uint64(extent), uint64(max(d, 1)))
		if high != 0 || low > math.MaxInt {
			return layout{}, fmt.Errorf("runtime: shape %v of %d-byte elements is larger than the address space: %w",
				shape, elemSize, ErrShape)
		}
		extent = int(low)
	}
	return l, nil
}

// stridedLayout checks strides given by the user.
func stridedLayout(shape, strides []int, elemSize int) (layout, error) {
	l, err := contiguousLayout(shape, elemSize)
	if err != nil {
		return layout{}, err
	}
	if len(strides) != len(shape) {
		return layout{}, fmt.Errorf("runtime: %d strides for shape %v: %w", len(strides), shape, ErrShape)
	}
	l.strides = slices.Clone(strides)
	reach := uint64(0)
	for i, d := range shape {
		high, steps := bits.Mul64(magnitude(strides[i]), uint64(max(d-1, 0)))
		high2, bytes := bits.Mul64(steps, uint64(elemSize))
		reach += bytes
		if high != 0 || high2 != 0 || bytes > math.MaxInt || reach > math.MaxInt {
			return layout{}, fmt.Errorf("runtime: shape %v with strides %v reaches beyond the address space: %w",
				shape, strides, ErrShape)
		}
	}
	return l, nil
}

func magnitude(n int) uint64 {
	if n < 0 {
		return -uint64(n)
	}
	return uint64(n)
}

// contiguous reports whether the elements are in row-major order without gaps.
// Strides of dimensions of size 1 do not matter, nor do those of empty arrays.
func (l layout) contiguous() bool {
	expect := 1
	for i, d := range slices.Backward(l.shape) {
		if d > 1 && l.strides[i] != expect {
			return l.len == 0
		}
		expect *= d
	}
	return true
}

// extent returns the range of element offsets in use, from first to last
// inclusive; l must not be empty.
func (l layout) extent() (first, last int) {
	for i, d := range l.shape {
		reach := l.strides[i] * (d - 1)
		first += min(reach, 0)
		last += max(reach, 0)
	}
	return first, last
}

func (l layout) checkDim(dim int) error {
	if dim < 0 || dim >= len(l.shape) {
		return fmt.Errorf("runtime: dimension %d of a tensor of rank %d: %w", dim, len(l.shape), ErrArgument)
	}
	return nil
}

// slice keeps the range from ≤ i < to of one dimension; offset is what the
// first element moves by.
func (l layout) slice(dim, from, to int) (s layout, offset int, err error) {
	if err := l.checkDim(dim); err != nil {
		return layout{}, 0, err
	}
	if from < 0 || to < from || to > l.shape[dim] {
		return layout{}, 0, fmt.Errorf("runtime: slice [%d:%d] of dimension %d of size %d: %w",
			from, to, dim, l.shape[dim], ErrArgument)
	}
	s = layout{shape: slices.Clone(l.shape), strides: slices.Clone(l.strides)}
	s.shape[dim] = to - from
	s.len = product(s.shape)
	if s.len > 0 {
		offset = from * l.strides[dim]
	}
	return s, offset, nil
}

// drop removes a dimension (of size 1).
func (l layout) drop(dim int) layout {
	return layout{
		shape:   slices.Delete(slices.Clone(l.shape), dim, dim+1),
		strides: slices.Delete(slices.Clone(l.strides), dim, dim+1),
		len:     l.len,
	}
}

// permute reorders the dimensions: the new dimension i is the old dims[i].
func (l layout) permute(dims []int) (layout, error) {
	if !isPermutation(dims, len(l.shape)) {
		return layout{}, fmt.Errorf("runtime: %v is no permutation of the %d dimensions: %w",
			dims, len(l.shape), ErrArgument)
	}
	p := layout{
		shape:   make([]int, len(dims)),
		strides: make([]int, len(dims)),
		len:     l.len,
	}
	for i, dim := range dims {
		p.shape[i] = l.shape[dim]
		p.strides[i] = l.strides[dim]
	}
	return p, nil
}

// isPermutation reports whether dims has each of 0 to n-1 once.
func isPermutation(dims []int, n int) bool {
	if len(dims) != n {
		return false
	}
	seen := make([]bool, n)
	for _, dim := range dims {
		if dim < 0 || dim >= n || seen[dim] {
			return false
		}
		seen[dim] = true
	}
	return true
}

func product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

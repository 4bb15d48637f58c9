// Package strided checks and simplifies the layouts of a strided copy, so that
// every runtime refuses the same arguments and a kernel sees few dimensions.
package strided

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/tutti-go/tutti/runtime"
)

// Axis is one dimension of a strided copy: its size, and the number of elements that a step along it moves in the
// destination and in the source.
type Axis struct {
	Size int // number of steps
	Dst  int // elements of a step in the destination
	Src  int // elements of a step in the source
}

// Axes checks the arguments of CopyStrided of [runtime.Runtime], except the addresses. It appends the dimensions that
// need a loop to all, in the order of shape, and returns the number of elements.
//
// The errors wrap [runtime.ErrShape] or [runtime.ErrArgument]. Without an error, all distances in bytes between
// elements, also one step further along an axis, fit an int.
func Axes(all []Axis, dstStrides, srcStrides, shape []int, elemSize int) (axes []Axis, count int, err error) {
	if len(dstStrides) != len(shape) || len(srcStrides) != len(shape) {
		return nil, 0, fmt.Errorf("%d destination and %d source strides for rank %d: %w",
			len(dstStrides), len(srcStrides), len(shape), runtime.ErrShape)
	}
	if elemSize <= 0 || elemSize > maxExtent {
		return nil, 0, fmt.Errorf("elements of %d bytes: %w", elemSize, runtime.ErrArgument)
	}
	// The array itself has to be addressable too: a product of sizes may exceed the extent of overlapping strides.
	total := extent(elemSize)
	var dst, src extent
	empty := false
	for i, size := range shape {
		x := Axis{size, dstStrides[i], srcStrides[i]}
		switch {
		case size < 0:
			return nil, 0, fmt.Errorf("dimension %d has size %d: %w", i, size, runtime.ErrShape)
		case size == 0:
			empty = true
			continue
		case size == 1:
			continue
		case x.Dst == 0:
			return nil, 0, fmt.Errorf("destination stride 0 in dimension %d of size %d: %w", i, size, runtime.ErrArgument)
		}
		if !dst.reach(x.Dst, size-1, elemSize) || !src.reach(x.Src, size-1, elemSize) || !total.multiply(size) {
			return nil, 0, fmt.Errorf("shape %v with strides %v or %v reaches beyond the address space: %w",
				shape, dstStrides, srcStrides, runtime.ErrArgument)
		}
		all = append(all, x)
	}
	if empty {
		return all, 0, nil
	}
	return all, int(total) / elemSize, nil
}

// extent is a number of bytes. Its limit is half of the largest int, so that one more step does not overflow.
type extent uint64

const maxExtent = math.MaxInt / 2

// reach adds a number of steps and reports whether the extent is addressable.
func (e *extent) reach(stride, steps, elemSize int) bool {
	way := extent(Distance(stride))
	ok := way.multiply(steps) && way.multiply(elemSize)
	*e += way
	return ok && *e <= maxExtent
}

// multiply reports whether the product is addressable.
func (e *extent) multiply(n int) bool {
	high, low := bits.Mul64(uint64(*e), uint64(n))
	*e = extent(low)
	return high == 0 && low <= maxExtent
}

// Join sorts axes so that the destination is written as sequentially as its layout allows, and joins those that are
// contiguous in both layouts. It works in place; the last axis of the result is the innermost.
func Join(all []Axis) []Axis {
	slices.SortStableFunc(all, func(x, y Axis) int {
		if Distance(x.Dst) != Distance(y.Dst) {
			return cmp.Compare(Distance(y.Dst), Distance(x.Dst))
		}
		return cmp.Compare(Distance(y.Src), Distance(x.Src))
	})
	joined := all[:0]
	for _, x := range all {
		last := len(joined) - 1
		if last >= 0 && joined[last].continues(x) {
			x.Size *= joined[last].Size
			joined[last] = x
			continue
		}
		joined = append(joined, x)
	}
	return joined
}

// continues reports whether a step along an axis continues after the end of another one, in both layouts.
func (a Axis) continues(inner Axis) bool {
	return a.Dst == inner.Dst*inner.Size && a.Src == inner.Src*inner.Size
}

// Distance returns the magnitude of a stride.
func Distance(stride int) int { return max(stride, -stride) }

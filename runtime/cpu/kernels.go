package cpu

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/simd"
	"github.com/tutti-go/tutti/runtime"
)

var _ runtime.Kernels = (*Runtime)(nil)

// The kernels of [runtime.Kernels]: each method checks its arguments, turns
// addresses into slices and leaves the work to a function on slices. They run
// on the calling goroutine and are done when they return. Every index of a list
// is checked against the array that it points into: that costs little beside
// following it there, and holds for lists that do not ascend as they should.

// Accumulate implements [runtime.Kernels].
func (rt *Runtime) Accumulate(acc, grad uintptr, n int, dt dtype.DType) error {
	const op = "Accumulate"
	if err := rt.checkArrays(op, array{"acc", acc, n}, array{"grad", grad, n}); err != nil {
		return err
	}
	if err := checkGradient(op, dt); err != nil {
		return err
	}
	accumulate(floats(acc, n), grad, dt)
	return nil
}

// Store implements [runtime.Kernels].
func (rt *Runtime) Store(dst uintptr, dt dtype.DType, src uintptr, n int, scale float32) error {
	const op = "Store"
	if err := rt.checkArrays(op, array{"dst", dst, n}, array{"src", src, n}); err != nil {
		return err
	}
	if err := checkGradient(op, dt); err != nil {
		return err
	}
	store(dst, dt, floats(src, n), scale)
	return nil
}

// Scale implements [runtime.Kernels].
func (rt *Runtime) Scale(x uintptr, n int, s float32) error {
	if err := rt.checkArrays("Scale", array{"x", x, n}); err != nil {
		return err
	}
	xs := floats(x, n)
	simd.Scale(xs, xs, s)
	return nil
}

// TopK implements [runtime.Kernels]. It reads x about once where magnitudes
// are spread, and a bounded number of times whatever x holds.
func (rt *Runtime) TopK(x uintptr, n, k int, idx, val uintptr) (count int, threshold float32, err error) {
	if k < 0 {
		return 0, 0, fmt.Errorf("cpu: TopK: k is %d: %w", k, runtime.ErrArgument)
	}
	k = min(k, max(n, 0))
	if err := rt.checkArrays("TopK", array{"x", x, n}, array{"idx", idx, k}, array{"val", val, k}); err != nil {
		return 0, 0, err
	}
	if k == 0 {
		return 0, 0, nil
	}
	return k, topK(floats(x, n), indices(idx, k), floats(val, k)), nil
}

// Select implements [runtime.Kernels]. A negative threshold selects all, as 0
// does. Entries of idx and val behind the last one selected, but below
// capacity, are undefined afterwards.
func (rt *Runtime) Select(x uintptr, n int, threshold float32, idx, val uintptr, capacity int) (total int, err error) {
	room := min(capacity, max(n, 0))
	if err := rt.checkArrays("Select", array{"x", x, n}, array{"idx", idx, room}, array{"val", val, room}); err != nil {
		return 0, err
	}
	return simd.SelectRange(floats(x, n), 0, thresholdKey(threshold), simd.MaxKey, indices(idx, room), floats(val, room)), nil
}

// CountAbove implements [runtime.Kernels]. A negative threshold counts all.
func (rt *Runtime) CountAbove(x uintptr, n int, threshold float32) (int, error) {
	if err := rt.checkArrays("CountAbove", array{"x", x, n}); err != nil {
		return 0, err
	}
	return simd.CountRange(floats(x, n), thresholdKey(threshold), simd.MaxKey), nil
}

// MeanStd implements [runtime.Kernels]. Both are 0 for no elements, and NaN or
// infinite where x is.
func (rt *Runtime) MeanStd(x uintptr, n int) (mean, std float64, err error) {
	if err := rt.checkArrays("MeanStd", array{"x", x, n}); err != nil {
		return 0, 0, err
	}
	mean, std = meanStd(floats(x, n))
	return mean, std, nil
}

// SumSquares implements [runtime.Kernels].
func (rt *Runtime) SumSquares(x uintptr, n int) (float64, error) {
	if err := rt.checkArrays("SumSquares", array{"x", x, n}); err != nil {
		return 0, err
	}
	return sumSquares(floats(x, n)), nil
}

// ScatterAdd implements [runtime.Kernels].
func (rt *Runtime) ScatterAdd(dst uintptr, n int, idx, val uintptr, m int) error {
	list, target, err := rt.checkList("ScatterAdd", array{"dst", dst, n}, array{"idx", idx, m}, array{"val", val, m})
	if err != nil {
		return err
	}
	scatterAdd(target, list, floats(val, m))
	return nil
}

// ScatterSet implements [runtime.Kernels].
func (rt *Runtime) ScatterSet(dst uintptr, n int, idx, val uintptr, m int) error {
	list, target, err := rt.checkList("ScatterSet", array{"dst", dst, n}, array{"idx", idx, m}, array{"val", val, m})
	if err != nil {
		return err
	}
	scatterSet(target, list, floats(val, m))
	return nil
}

// Gather implements [runtime.Kernels].
func (rt *Runtime) Gather(src uintptr, n int, idx uintptr, m int, val uintptr) error {
	list, source, err := rt.checkList("Gather", array{"src", src, n}, array{"idx", idx, m}, array{"val", val, m})
	if err != nil {
		return err
	}
	gather(floats(val, m), source, list)
	return nil
}

// ZeroAt implements [runtime.Kernels].
func (rt *Runtime) ZeroAt(dst uintptr, n int, idx uintptr, m int) error {
	list, target, err := rt.checkList("ZeroAt", array{"dst", dst, n}, array{"idx", idx, m})
	if err != nil {
		return err
	}
	zeroAt(target, list)
	return nil
}

// OffsetIndices implements [runtime.Kernels]. An offset that would make the
// first index negative or the last one overflow is an error.
func (rt *Runtime) OffsetIndices(idx uintptr, m int, offset int32) error {
	if err := rt.checkArrays("OffsetIndices", array{"idx", idx, m}); err != nil {
		return err
	}
	if m == 0 {
		return nil
	}
	list := indices(idx, m)
	first, last := int64(list[0])+int64(offset), int64(list[m-1])+int64(offset)
	if first < 0 || last > math.MaxInt32 {
		return fmt.Errorf("cpu: OffsetIndices: %d moves indices %d…%d out of range: %w",
			offset, list[0], list[m-1], runtime.ErrArgument)
	}
	offsetIndices(list, offset)
	return nil
}

// MergeAdd implements [runtime.Kernels].
func (rt *Runtime) MergeAdd(idxA, valA uintptr, ma int, idxB, valB uintptr, mb int, idxOut, valOut uintptr) (int, error) {
	const op = "MergeAdd"
	if err := rt.checkArrays(op, array{"idxA", idxA, ma}, array{"valA", valA, ma}, array{"idxB", idxB, mb}, array{"valB", valB, mb}); err != nil {
		return 0, err
	}
	m := ma + mb
	if err := rt.checkArrays(op, array{"idxOut", idxOut, m}, array{"valOut", valOut, m}); err != nil {
		return 0, err
	}
	return mergeAdd(
		entries{indices(idxA, ma), floats(valA, ma)},
		entries{indices(idxB, mb), floats(valB, mb)},
		entries{indices(idxOut, m), floats(valOut, m)}), nil
}

// LowerBounds implements [runtime.Kernels]. The bounds may be in any order.
func (rt *Runtime) LowerBounds(idx uintptr, m int, bounds []int32, positions []int) error {
	if err := rt.checkArrays("LowerBounds", array{"idx", idx, m}); err != nil {
		return err
	}
	if len(bounds) != len(positions) {
		return fmt.Errorf("cpu: LowerBounds: %d bounds but room for %d positions: %w",
			len(bounds), len(positions), runtime.ErrArgument)
	}
	lowerBounds(indices(idx, m), bounds, positions)
	return nil
}

// array is an argument: n elements at address p.
type array struct {
	name string
	p    uintptr
	n    int
}

// checkArrays reports the first array whose length or address cannot be right.
func (rt *Runtime) checkArrays(op string, arrays ...array) error {
	if rt.pool.Closed() {
		return errClosed(op)
	}
	for _, a := range arrays {
		switch {
		case a.n < 0 || a.n > math.MaxInt32:
			return fmt.Errorf("cpu: %s: %s has %d elements, want 0 to %d: %w", op, a.name, a.n, math.MaxInt32, runtime.ErrArgument)
		case a.n > 0 && a.p == 0:
			return fmt.Errorf("cpu: %s: %s is nil but has %d elements: %w", op, a.name, a.n, runtime.ErrArgument)
		}
	}
	return nil
}

// checkGradient refuses element types that gradients do not have.
func checkGradient(op string, dt dtype.DType) error {
	switch dt {
	case dtype.F32, dtype.F16, dtype.BF16:
		return nil
	}
	return fmt.Errorf("cpu: %s: element type is %s, want f32, f16 or bf16: %w", op, dt, runtime.ErrDType)
}

// checkList checks target, a list of indices idx that point into it, and other
// arrays. It returns the indices and the target.
func (rt *Runtime) checkList(op string, target, idx array, others ...array) ([]int32, []float32, error) {
	if err := rt.checkArrays(op, target, idx); err != nil {
		return nil, nil, err
	}
	if err := rt.checkArrays(op, others...); err != nil {
		return nil, nil, err
	}
	list := indices(idx.p, idx.n)
	if i, ok := outside(list, target.n); ok {
		return nil, nil, fmt.Errorf("cpu: %s: %s[%d] is %d, %s has %d elements: %w",
			op, idx.name, i, list[i], target.name, target.n, runtime.ErrArgument)
	}
	return list, floats(target.p, target.n), nil
}

// thresholdKey returns the smallest key that counts as at least t.
func thresholdKey(t float32) uint32 {
	if t <= 0 {
		return 0
	}
	return simd.Key(t)
}

func floats(p uintptr, n int) []float32 { return hostmem.Slice[float32](p, n) }
func indices(p uintptr, n int) []int32  { return hostmem.Slice[int32](p, n) }

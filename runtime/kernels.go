package runtime

import "github.com/tutti-go/tutti/dtype"

// Kernels is what the sparse patterns of package distributed need of a device.
//
// Conventions, the same on every device:
//
//   - Buffers are device memory. acc, x and val hold F32, idx holds I32 (so an
//     array has at most 2^31-1 elements; more is [ErrArgument]); lengths are in
//     elements. Addresses are aligned to 4 bytes (a gradient of 2-byte elements
//     to 2) and to nothing more: lists are cut anywhere.
//   - Index lists are strictly ascending unless a method says otherwise. They
//     may come from another rank, so the methods that follow them through an
//     array take its length n: an index outside [0, n) is [ErrArgument] before
//     anything is written. Of a list that has to ascend, a device may look at
//     the first and the last index only, if it skips what is out of range in
//     between: whatever a list holds, no memory outside the arrays is touched.
//   - Work is ordered on the compute stream. A method that returns a number
//     waits for it.
//   - Magnitude is compared by the bits of |x| as an unsigned integer:
//     NaN > +Inf > finite > 0. It equals the order of |x| on numbers, is total,
//     and lets NaN and Inf travel with the selected entries as they would in a
//     dense allreduce, instead of hiding in a residual for ever.
//   - Results are deterministic: the same input gives the same bits.
type Kernels interface {
	// Accumulate adds a gradient to the residual: acc[i] += float32(grad[i]).
	// dt is the gradient's type: F32, F16 or BF16.
	Accumulate(acc, grad uintptr, n int, dt dtype.DType) error
	// Store writes dst[i] = dt(src[i] * scale), rounding to nearest even.
	// dst == src is allowed for F32.
	Store(dst uintptr, dt dtype.DType, src uintptr, n int, scale float32) error
	// Scale multiplies in place: x[i] *= s.
	Scale(x uintptr, n int, s float32) error

	// TopK writes the indices and values of the k entries of largest magnitude
	// (exactly min(k, n); among equals the lower index wins), ascending by
	// index, and returns how many it wrote and the smallest magnitude among
	// them (0 when none).
	TopK(x uintptr, n, k int, idx, val uintptr) (count int, threshold float32, err error)
	// Select writes the entries with magnitude >= threshold, ascending by
	// index, at most capacity of them, and returns how many there are in all
	// (which may exceed capacity; the first ones by index are kept then).
	Select(x uintptr, n int, threshold float32, idx, val uintptr, capacity int) (total int, err error)
	// CountAbove returns how many entries have magnitude >= threshold.
	CountAbove(x uintptr, n int, threshold float32) (int, error)
	// MeanStd returns the mean and the (population) standard deviation of x.
	MeanStd(x uintptr, n int) (mean, std float64, err error)
	// SumSquares returns the sum of x[i]*x[i], accumulated in float64 or better
	// than float32 by blocks.
	SumSquares(x uintptr, n int) (float64, error)

	// ScatterAdd adds dst[idx[i]] += val[i] for the m entries; dst has n
	// elements. Indices are distinct within a call; calling once per rank in
	// rank order gives the same bits everywhere.
	ScatterAdd(dst uintptr, n int, idx, val uintptr, m int) error
	// ScatterSet stores dst[idx[i]] = val[i]; dst has n elements, indices are
	// distinct.
	ScatterSet(dst uintptr, n int, idx, val uintptr, m int) error
	// Gather reads val[i] = src[idx[i]]; src has n elements. Indices may come in
	// any order and repeat, so all of them are checked. It moves 4-byte words
	// bit for bit: src and val may as well hold I32.
	Gather(src uintptr, n int, idx uintptr, m int, val uintptr) error
	// ZeroAt stores 0 at the m indices; dst has n elements.
	ZeroAt(dst uintptr, n int, idx uintptr, m int) error
	// OffsetIndices adds offset to every index: idx[i] += offset.
	OffsetIndices(idx uintptr, m int, offset int32) error
	// MergeAdd merges two index lists into one; values of an index that both
	// have are added (a + b). It returns the length of the result, at most
	// ma+mb, for which idxOut and valOut must have room; the output must not
	// overlap the inputs.
	MergeAdd(idxA, valA uintptr, ma int, idxB, valB uintptr, mb int, idxOut, valOut uintptr) (int, error)
	// LowerBounds returns for each bound b how many of the m indices are < b.
	// It writes into positions, which has the length of bounds.
	LowerBounds(idx uintptr, m int, bounds []int32, positions []int) error
}

package kernel

import (
	"fmt"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Entries is a list of sparse elements in device memory.
type Entries struct {
	// Idx is the address of I32 indices, strictly ascending.
	Idx uintptr
	// Val is the address of F32 values.
	Val uintptr
	// N is the number of entries, or the capacity where Len is set; at most 2^31-1.
	N int
	// Len is the device address of an I32, the number of entries; 0 where that is
	// N. A method that reads a list takes a length below 0 as 0 and one above N as
	// N, as it may come from another rank.
	Len uintptr
	// Shared is not 0 in a list that other ranks have as well, in their memory
	// (backend.SharedLists): TopK, Select, SelectNear, TopKList, SelectList and Union
	// write such a dst there too. All other methods ignore it.
	Shared uintptr
}

// Array is what the indices of a list point into.
type Array struct {
	// Ptr is the address of F32 elements.
	Ptr uintptr
	// N is the number of elements, at most 2^31-1.
	N int
	// Faults is the device address of an I32 to which every entry adds one that
	// is skipped because its index is not in [0, N); 0: they are not counted.
	Faults uintptr
}

// Source is the array that a selection reads.
type Source struct {
	// X is the address of F32 elements.
	X uintptr
	// N is the number of elements, at most 2^31-1.
	N int
	// Grad, if not 0, is the address of N elements that are added in the same pass:
	// X[i] = From[i] + float32(Grad[i]) * factor. The product is rounded before the
	// sum.
	Grad uintptr
	// DType is the type of the elements at Grad: F32, F16 or BF16.
	DType dtype.DType
	// Factor is the device address of the F32 factor of Grad; 0: it is 1.
	Factor uintptr
	// From is the address of the N F32 that Grad is added to, and which stay as
	// they are; 0: X. Without Grad it is ignored.
	From uintptr
	// Keep, if not 0, is the address of N F32 that receive the values to which Grad is added, bit for bit. If a call
	// then fails, X is as it was. Without Grad it is ignored.
	Keep uintptr
	// Take zeroes the selected entries in X.
	Take bool
}

// Copy is a copy of N elements, bit for bit.
type Copy struct {
	Dst   uintptr     // where the elements go
	Src   uintptr     // 0 stores zeros
	DType dtype.DType // their type
	N     int         // number of elements
}

// MaxCopies is how many copies [Kernels.CopyIf] makes at most.
const MaxCopies = 4

// Acceptance says which thresholds [Kernels.SelectNear] accepts, and how it updates them.
type Acceptance struct {
	// Min is the fewest entries that may pass.
	Min int
	// Interval is for how many calls a threshold serves before it is computed
	// exactly again; 0: as long as it is accepted.
	Interval int
	// Step is the factor by which an accepted threshold is corrected if fewer than
	// 2k/3 or more than 5k/4 entries passed it; 0: it is not corrected.
	Step float32
}

// Piece is a part of a list, and where it is copied to.
type Piece struct {
	// From is the list.
	From Entries
	// Start and End are the device addresses of I32: the positions in From of the piece's first entry and of the one
	// behind its last. 0 is the list's beginning or end. A position outside the list is its beginning or end, and an End
	// before Start makes an empty piece.
	Start, End uintptr
	// ByIndex makes Start and End indices instead: the piece has the entries whose index is at least the first and
	// below the second.
	ByIndex bool
	// To is where the piece is put.
	To Entries
}

// MaxPieces is how many pieces [Kernels.CopyPieces] puts together at most.
const MaxPieces = 8

// Restoration holds the arguments of [Kernels.Restore]. The zero Restoration restores nothing.
type Restoration struct {
	Dst   Array   // what entries are restored to
	L     Entries // which may be restored
	Taken Entries // whose indices are not restored
}

// Kernels are the operations that the sparse patterns of package distributed need on a device. A runtime that has
// them implements [Provider].
//
// Conventions, the same on every device:
//
//   - Nothing waits for the device. Work is ordered on the compute stream, and numbers (counts I32, thresholds F32,
//     moments F64) go in and out by device address, aligned to their size. The host reads them, if at all, when it
//     has waited for the stream. So every method can be captured in a graph.
//   - Buffers are device memory; lengths are in elements. Addresses are aligned
//     to 4 bytes (those of 2-byte elements to 2) and to nothing more: lists are
//     cut anywhere. Buffers do not overlap unless a method says so.
//   - Arguments that can be seen without waiting are checked before anything is
//     submitted: a negative length or one above 2^31-1, a nil address with a
//     length above zero or of a number that is not optional are [runtime.ErrArgument],
//     another type of gradient is [runtime.ErrDType].
//   - Lists may come from another rank. An index out of range is skipped and
//     counted ([Array].Faults). Even an invalid list touches no memory
//     outside the arrays. The result of a list that does not ascend is undefined,
//     but bounded like that.
//   - Magnitude is compared by the bits of |x| as an unsigned integer:
//     NaN > +Inf > finite > 0. It equals the order of |x| on numbers, is total,
//     and lets NaN and Inf travel with the selected entries as they would in a
//     dense allreduce, instead of hiding in a residual forever. A negative
//     threshold lets everything pass, as 0 does.
//   - Results are deterministic: the same input gives the same bits, on every
//     device. Sums of F32 round after every addition, in the order given;
//     products round before they are added. Two things are a device's own: the
//     order in which it adds up F64, and the payload and sign of a NaN that its
//     arithmetic produces.
//   - A selection writes at most dst.N entries, ascending by index, the first
//     ones by index if there are more; what lies behind them, up to dst.N, is
//     undefined then. Where dst.Len is set it stores how many there are in all,
//     also if that is more than dst.N.
type Kernels interface {
	// Accumulate adds a gradient: x[i] = from[i] + float32(grad[i]) * factor, as
	// Source describes (src.Take is ignored, src.Grad may not be 0).
	Accumulate(src Source) error
	// Store writes dst[i] = dt(src[i] * scale), rounding to nearest even.
	// dst == src is allowed for F32. excess, if not 0, is the address of n F32: a
	// finite product beyond the largest number of dt is stored as that number, with
	// its sign, and the difference is added to excess[i]. Otherwise it becomes an
	// infinity.
	Store(dst uintptr, dt dtype.DType, src uintptr, n int, scale float32, excess uintptr) error
	// Scale multiplies in place: x[i] = dt(float32(x[i]) * factor), where factor
	// is the address of an F32.
	Scale(x uintptr, dt dtype.DType, n int, factor uintptr) error
	// SumSquares stores the sum of x[i]*x[i] in the F64 at sum, accumulated in
	// float64. x is F32, F16 or BF16.
	SumSquares(x uintptr, dt dtype.DType, n int, sum uintptr) error
	// ClipFactor stores in the F32 at factor what scales a gradient of norm
	// sqrt(squares*share) to at most limit: limit/norm if the norm is finite and
	// above limit, otherwise 1. squares is the sum of m F64, in their order, m at
	// least 1.
	ClipFactor(factor, squares uintptr, m int, share, limit float64) error

	// CopyIf makes at most [MaxCopies] copies if any of the m I32 at flags is not 0,
	// and otherwise writes nothing. m is at least 1. No copy reads or writes what another
	// one writes.
	CopyIf(copies []Copy, flags uintptr, m int) error

	// TopK selects the min(k, n) entries of largest magnitude; among equals the
	// lower index wins. dst.N is at least min(k, n). Where dst.Len is set,
	// zeros are left out. threshold, if not 0, is the address of an F32: what it
	// holds is taken as a guess of the min(k, n)-th largest magnitude (which
	// costs or saves time only; 0 is none), and then it is that magnitude; where
	// zeros are left out, it is at least the smallest number above 0, and if k
	// or n is 0, it is 0. threshold[1] is the margin m (F32) of the guess g, which
	// saves time if the magnitude is at least g·(1-m). A margin below 1/512
	// or above 1/8 (or a NaN) is taken as 1/32. If the guess g is finite and above 0, and t
	// the magnitude found, a margin m becomes the greater one of m·31/32 and (g-t)/g·3/2,
	// within these bounds, each operation rounded (the first if t is a NaN).
	TopK(src Source, k int, dst Entries, threshold uintptr) error
	// Select selects the entries of magnitude >= the F32 at threshold.
	Select(src Source, threshold uintptr, dst Entries) error
	// SelectNear selects about k entries by a threshold that an earlier call left,
	// or another method. The state is a threshold (F32), and behind it its age
	// (I32), in calls. The entries that pass are selected if the threshold is
	// finite and above 0, its age is below o.Interval-1 (or o.Interval is 0), and
	// at least o.Min and at most dst.N entries pass; then the age grows by one, and the
	// threshold is divided by o.Step if 3*passed < 2k, or multiplied by it if
	// 4*passed > 5k, and not below the smallest number above 0. Otherwise TopK
	// selects, without zeros, and leaves its threshold, of age 0. dst.Len is set.
	// used, if not 0, is the address of an F32 for the threshold that was used.
	SelectNear(src Source, k int, state uintptr, o Acceptance, dst Entries, used uintptr) error
	// Fit stores in the F32 at threshold |mean| + z*std of the array, in F64 until
	// it is stored (mean and population standard deviation), and not below the
	// smallest number above 0; a NaN stays one, and without elements both moments
	// are 0. It adds src.Grad first and ignores src.Take.
	Fit(src Source, z float64, threshold uintptr) error
	// Refine replaces the F32 at threshold, t, unless between 3k/4 and 5k/4 entries
	// of x pass it or t is not finite: by t*factors[j] for the lowest of these
	// products that at most 5k/4 entries pass, or the highest if more pass
	// all of them. factors ascend; there are at most 64 (without any, t stays).
	Refine(x uintptr, n int, threshold uintptr, k int, factors []float32) error

	// TopKList selects the k entries of largest magnitude of a list (all if it has fewer, zeros too); among equals the
	// earlier wins. dst.N is at least min(k, l.N). without, if not 0, is the address of two I32: entries whose index is
	// not below the first and below the second take no part. Entries that take part and are not selected are added to
	// residual, unless its Ptr is 0: residual[idx[i]] += val[i].
	TopKList(l Entries, k int, dst Entries, without uintptr, residual Array) error
	// SelectList selects the entries of a list of magnitude >= the F32 at threshold.
	SelectList(l Entries, threshold uintptr, dst Entries) error
	// CountAbove counts, for m thresholds (F32) at once, how many values of a list
	// (l.Idx is not looked at) have magnitude >= it. counts are m I32.
	CountAbove(l Entries, thresholds uintptr, m int, counts uintptr) error
	// Narrow does a round of a search for the k-th largest magnitude of what
	// several ranks hold. bracket is the address of two U32, low and high: at
	// least k magnitudes are >= low, by their bits, and fewer are >= high (low
	// starts at 1 whatever there is). A round cuts the bracket at
	// low + (high-low)/(m+1)*(j+1), j = 0 … m-1: these thresholds are stored as F32
	// in m words, to be counted on all ranks. counts has the sums of these counts
	// for the m thresholds of the round before: the new bracket runs from the last
	// threshold with a count of at least k to the next; 0 starts a search
	// with {1, 2^31}. Read as F32, low is the threshold found.
	Narrow(bracket uintptr, counts uintptr, k int, thresholds uintptr, m int) error

	// Merge writes all n elements of dst: 0, plus val * scale of every entry, list
	// by list in the order given, in F32, rounded to dt at last. excess is as in
	// Store. Besides, it does what Restore(back.Dst, back.L, back.Taken) does, if back.L may
	// hold entries. back.Dst may be the memory at excess, if no index that is restored is one
	// of the lists'.
	Merge(dst uintptr, dt dtype.DType, n int, lists []Entries, scale float32, faults, excess uintptr,
		back Restoration) error
	// Union writes the entries that Merge would make different from what it
	// started with, those whose sum is 0 included: the union of the lists'
	// indices, ascending, and the sums. dst.Len is set to how many there are. threshold, if
	// not 0, is the address of an F32: sums of magnitude below it are left out. If there are
	// more than dst.N, the first ones are written.
	Union(dst Entries, n int, lists []Entries, scale float32, faults, threshold uintptr) error
	// ScatterAdd adds dst[idx[i]] += val[i] * scale; the product is rounded before
	// the sum.
	ScatterAdd(dst Array, l Entries, scale float32) error
	// ScatterZero stores 0 at the indices of the list; l.Val is not looked at.
	ScatterZero(dst Array, l Entries) error
	// Restore adds dst[idx[i]] += val[i] for the entries of l whose index is not
	// among those of taken. Only entries of l count as faults.
	Restore(dst Array, l, taken Entries) error
	// LowerBounds stores for each of m bounds (I32) how many indices of the list
	// are below it, in the I32 at positions; and, if lengths is not 0, there
	// positions[i+1]-positions[i] for the first m-1.
	LowerBounds(l Entries, bounds uintptr, m int, positions, lengths uintptr) error
	// CopyPieces copies pieces of lists. Pieces that follow each other and have the same To, at most [MaxPieces], are put
	// together there in their order; To.Len is set, and To.N is the capacity: entries beyond it are counted only. No list
	// that is read is written.
	CopyPieces(pieces []Piece) error
	// Sample stores an I32 for each of the quantiles, which are in [0, 1) and at
	// most 64: the index of the list at position len*quantile, rounded down (in
	// F64); n*quantile if the list is empty.
	Sample(l Entries, quantiles []float64, n int, dst uintptr) error
	// TopKChunks selects the min(k, length) entries of largest magnitude, zeros too, of each
	// chunk of that many elements (at least 1; the last one may be shorter); among equals the lower
	// index wins. dst.N is at least their number, [ChunkedLen], to which dst.Len is set.
	TopKChunks(src Source, k, chunk int, dst Entries) error

	// Encode writes a list as a message of codec c, see [Codec], if dst has room for [Codec.Fit] entries with indices in a
	// range of n, and otherwise the first ones. dst.Bytes is at least 8. The loss of rounding, value - decoded, rounded to
	// F32, is added to lost at the entry's index, and so is the whole value of an entry for which there is no room; a
	// value decoded as NaN or infinity loses nothing. lost.Ptr may be 0. With [CodecPositions] l.Val is not looked at, and
	// nothing is lost. If the list does not ascend, or has indices in a wider range, the message is undefined, but not
	// longer than dst.Bytes.
	Encode(l Entries, c Codec, n int, dst Message, lost Array) error
	// Decode reads a message into a list; dst.Len is set to its length, at most dst.N. With
	// [CodecPositions] dst.Val is not written. Any message is decoded in a time proportional to dst.N, and
	// without touching other memory: one whose length is above src.Bytes, or that is too short for
	// its entries, as an empty list, and others that no Encode wrote as entries of any content.
	Decode(src Message, c Codec, dst Entries) error
	// Quantize writes an array of n F32 in codec c, in c.Size(n) bytes at dst, which is aligned to 4
	// bytes. lost, if not 0, is the address of n F32, possibly src, that become value - decoded, rounded
	// to F32, and 0 where that is not finite.
	Quantize(dst uintptr, c Codec, src uintptr, n int, lost uintptr) error
	// Dequantize stores n values of codec c, or adds them, each sum rounded to F32, to the F32 at dst. src is aligned
	// to 4 bytes.
	Dequantize(dst uintptr, c Codec, src uintptr, n int, add bool) error

	// RaiseExponents raises the exponents of f to those of its N elements at x, F32, F16 or BF16.
	RaiseExponents(f Fixed, x uintptr, dt dtype.DType) error
	// StoreFixed stores the N elements at x, F32, F16 or BF16, as terms, rounded to nearest even, or adds them to the
	// sums. Exponents are at least those of x. Sums in a block that is not finite are undefined.
	StoreFixed(f Fixed, x uintptr, dt dtype.DType, add bool) error
	// LoadFixed stores the sums as elements of type dt: the F64 product of a sum, the power of two of its unit, and
	// 1/divisor times the F32 at factor, unless that is 0, both rounded to F64 before, is rounded to F32, and to dt. A
	// value beyond the largest number of dt becomes that number, with its sign. All elements of a block that is not finite
	// are NaN. divisor is at least 1.
	LoadFixed(dst uintptr, dt dtype.DType, f Fixed, divisor int, factor uintptr) error
	// SquareFixed stores in the F64 at sum the sum of the squares of the sums, times the squares of their units and of
	// 1/divisor, with the same bits on every device: where all of them are less than 2^t, each square is cut to a multiple
	// of 2^(2t-56). It is NaN if a block is not finite.
	SquareFixed(f Fixed, divisor int, sum uintptr) error

	// Balance sorts m samples (I32) in place and stores parts+1 bounds (I32): 0,
	// n, and between them samples[r*m/parts], within [0, n]. m and parts are at
	// least 1.
	Balance(samples uintptr, m, n int, bounds uintptr, parts int) error
}

// Provider is implemented by runtimes that have kernels.
type Provider interface {
	// Kernels returns the kernels, whose work is ordered on the runtime's compute
	// stream.
	Kernels() Kernels
}

// Lookup returns the kernels of a runtime. If the runtime has none, the error wraps [runtime.ErrUnsupported].
func Lookup(rt runtime.Runtime) (Kernels, error) {
	provider, ok := rt.(Provider)
	if !ok {
		return nil, fmt.Errorf("runtime %s has no sparse kernels: %w", rt.Name(), runtime.ErrUnsupported)
	}
	return provider.Kernels(), nil
}

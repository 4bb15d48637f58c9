package simd

import "github.com/tutti-go/tutti/internal/hostmem"

// Kind says how a reduction reads the elements of a buffer.
type Kind uint8

// The kinds of elements. F16 is IEEE 754 binary16, BF16 the upper half of
// binary32, and FP8E4M3 and FP8E5M2 are the types of the OCP 8-bit Floating
// Point Specification. These four are combined as float32 and rounded once, to
// nearest even, when the result is stored; what is beyond the largest number
// becomes an infinity in the first two and that number in the FP8 types. A
// Bool is a byte that is true when not zero; results are 0 or 1.
const (
	F64 Kind = iota
	F32
	F16
	BF16
	FP8E4M3
	FP8E5M2
	I64
	I32
	I16
	I8
	U64
	U32
	U16
	U8
	Bool
	numKinds
)

var kindSizes = [numKinds]int{
	F64: 8, F32: 4, F16: 2, BF16: 2, FP8E4M3: 1, FP8E5M2: 1,
	I64: 8, I32: 4, I16: 2, I8: 1,
	U64: 8, U32: 4, U16: 2, U8: 1, Bool: 1,
}

// Size returns the number of bytes of one element.
func (k Kind) Size() int { return kindSizes[k] }

// Op is the way in which two elements are combined.
type Op uint8

// The operations. Integers wrap around. OpMin and OpMax are IEEE 754-2019's
// minimum and maximum: -0 is less than +0, and if any element is a NaN the
// result is the NaN with only the quiet bit set. OpAvg is OpAdd followed by one
// division by the number of sources; it is defined on the floats only. On Bool,
// OpAdd and OpMax are "or", OpMul and OpMin are "and".
const (
	OpAdd Op = iota
	OpMul
	OpMin
	OpMax
	OpAvg
	numOps
)

// Reduce combines n elements of all srcs, in the order of srcs, and stores the
// result in every one of dsts:
//
//	dst[i] = srcs[0][i] op srcs[1][i] op … (then / len(srcs) for OpAvg)
//
// Each source is read once and each destination written once. A destination
// may be one of the sources; any other overlap is not allowed. There is at
// least one source, and the operation is defined on the kind. The values of
// a single source are copied bit by bit (a Bool becomes 0 or 1).
//
// stream asks for stores that bypass the caches, which pays when the
// destinations are larger than these and are not read again soon. The stores
// are visible to other processors when Reduce returns. It is a hint: it is not
// followed where destinations are aligned differently.
func Reduce(k Kind, op Op, dsts, srcs []uintptr, n int, stream bool) {
	if n <= 0 || len(dsts) == 0 {
		return
	}
	if len(srcs) == 1 && k != Bool {
		// Bytes move as they are: no NaN is quieted, nothing is divided.
		n *= k.Size()
		k, op = U8, OpAdd
	}
	reduce(k, op, dsts, srcs, n, stream)
}

// Copy copies n bytes from address src to address dst; the two ranges do not
// overlap. stream is as in [Reduce].
func Copy(dst, src uintptr, n int, stream bool) {
	if n <= 0 {
		return
	}
	if stream {
		dsts, srcs := [...]uintptr{dst}, [...]uintptr{src}
		reduce(U8, OpAdd, dsts[:], srcs[:], n, true)
		return
	}
	copy(hostmem.Slice[byte](dst, n), hostmem.Slice[byte](src, n))
}

package cpu

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/simd"
)

// Reduce combines count elements of all srcs, in the order of srcs, and stores
// the result in every one of dsts. Both hold addresses of host buffers.
//
// F16, BF16 and the FP8 types are accumulated in float32 and rounded once, to
// nearest even; FP8 saturates as [dtype.FromFloat32] does. Avg divides the sum
// once by len(srcs). Integers wrap around, Bool follows
// [dtype.ReduceOp.Defined]. Min and Max of floats are minimum and maximum of
// IEEE 754-2019: a NaN in any source gives a NaN, always the same one, and -0
// is less than +0. A single source is copied bit by bit (a Bool becomes 0 or 1).
// All ranks that combine the same sources in the same order store the same
// bits, whatever their processor's vector instructions, except for the payload
// and sign of the NaN that an addition or multiplication gives.
//
// A destination may be one of the sources; other overlaps are not allowed.
// streaming makes the stores bypass the caches: right for outputs larger than
// these. They are visible to other goroutines when Reduce returns.
//
// The arguments are trusted: at least one source, count elements behind every
// address, an op that is defined on dt. Reduce allocates nothing and may be
// called from several goroutines at once.
func Reduce(dsts, srcs []uintptr, count int, dt dtype.DType, op dtype.ReduceOp, streaming bool) {
	if count <= 0 || len(dsts) == 0 {
		return
	}
	simd.Reduce(simdKinds[dt], simdOps[op], dsts, srcs, count, streaming)
}

// simdKinds and simdOps are the names that package simd, which cannot import
// dtype, has for the types and reductions.
var (
	simdKinds = [...]simd.Kind{
		dtype.F64: simd.F64, dtype.F32: simd.F32,
		dtype.F16: simd.F16, dtype.BF16: simd.BF16,
		dtype.FP8E4M3: simd.FP8E4M3, dtype.FP8E5M2: simd.FP8E5M2,
		dtype.I64: simd.I64, dtype.I32: simd.I32, dtype.I16: simd.I16, dtype.I8: simd.I8,
		dtype.U64: simd.U64, dtype.U32: simd.U32, dtype.U16: simd.U16, dtype.U8: simd.U8,
		dtype.Bool: simd.Bool,
	}
	simdOps = [...]simd.Op{
		dtype.Sum: simd.OpAdd, dtype.Prod: simd.OpMul,
		dtype.Min: simd.OpMin, dtype.Max: simd.OpMax, dtype.Avg: simd.OpAvg,
	}
)

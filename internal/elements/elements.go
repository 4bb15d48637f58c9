// Package elements numbers the types of elements and their reductions as the GPU's kernels do
// (runtime/cuda/kernels/element.cuh).
package elements

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

// The enum reduction of element.cuh.
const (
	Sum = iota
	Product
	Minimum
	Maximum
	Average
	SignedMinimum
	SignedMaximum
	Any
	All
)

var codes = [...]uint32{
	reductions.Sum:  Sum,
	reductions.Prod: Product,
	reductions.Min:  Minimum,
	reductions.Max:  Maximum,
	reductions.Avg:  Average,
}

var names = [...]string{
	dtype.F64:     "f64",
	dtype.F32:     "f32",
	dtype.F16:     "f16",
	dtype.BF16:    "bf16",
	dtype.FP8E4M3: "e4m3",
	dtype.FP8E5M2: "e5m2",
	dtype.I64:     "i64",
	dtype.U64:     "i64",
	dtype.I32:     "i32",
	dtype.U32:     "i32",
	dtype.I16:     "i16",
	dtype.U16:     "i16",
	dtype.I8:      "i8",
	dtype.U8:      "i8",
	dtype.Bool:    "i8",
}

// Name returns the name of a type's elements, which ends the names of kernels. Kernels do not tell types of one name
// apart: their reductions have different codes.
func Name(dt dtype.DType) string { return names[dt] }

// Code returns the kernels' number of a reduction.
func Code(dt dtype.DType, op reductions.Op) uint32 {
	switch {
	case dt == dtype.Bool && (op == reductions.Sum || op == reductions.Max):
		return Any
	case dt == dtype.Bool:
		return All
	case signed(dt) && op == reductions.Min:
		return SignedMinimum
	case signed(dt) && op == reductions.Max:
		return SignedMaximum
	}
	return codes[op]
}

// signed reports whether elements are integers with a sign. Kernels of floats have no other minimum than theirs.
func signed(dt dtype.DType) bool {
	switch dt {
	case dtype.I64, dtype.I32, dtype.I16, dtype.I8:
		return true
	}
	return false
}

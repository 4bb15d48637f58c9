package dtype

import (
	"encoding/binary"
	"unsafe"

	"github.com/x448/float16"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// Element is the set of Go types that represent one element: the constraint
// of generic functions over typed host data. [Of] says which DType a type has.
//
// Beside the types of the standard library, float16.Float16 and those of this
// package it holds the 16-bit and 8-bit floats of other libraries, which are
// named types of uint16 and uint8 with a method
//
//	Float32() float32
//
// Nothing has to be registered: the method's results for a few bit patterns tell f16 from bf16, and fp8e4m3 from
// fp8e5m2. A named type without the method, or whose method reads them as none of these, has no DType: Of returns
// [Invalid], and other functions refuse the type.
type Element interface {
	float64 | float32 | int64 | int32 | int16 | int8 | uint64 | uint32 | ~uint16 | ~uint8 | bool
}

// Of returns the DType whose elements the Go type T represents, or [Invalid] for
// a named type of uint16 or uint8 that [Element] does not know as a float.
func Of[T Element]() DType {
	var zero T
	switch any(zero).(type) {
	case float64:
		return F64
	case float32:
		return F32
	case float16.Float16:
		return F16
	case BFloat16:
		return BF16
	case Float8E4M3:
		return FP8E4M3
	case Float8E5M2:
		return FP8E5M2
	case int64:
		return I64
	case int32:
		return I32
	case int16:
		return I16
	case int8:
		return I8
	case uint64:
		return U64
	case uint32:
		return U32
	case uint16:
		return U16
	case uint8:
		return U8
	case bool:
		return Bool
	}
	return float[T]()
}

// float returns the DType of a named type that reads ones, and what the other
// types have in their place, as that DType does.
func float[T Element]() DType {
	x := new(T)
	f, ok := any(x).(interface{ Float32() float32 })
	if !ok {
		return Invalid
	}
	bits := hostmem.Bytes(unsafe.Slice(x, 1))
	for _, d := range [...]DType{F16, BF16, FP8E4M3, FP8E5M2} {
		if d.Size() == len(bits) && readsAs(d, f.Float32, bits) {
			return d
		}
	}
	return Invalid
}

// readsAs reports whether read takes some bit patterns for the numbers that they
// are as d. None of them is subnormal, which some libraries take for zero.
func readsAs(d DType, read func() float32, bits []byte) bool {
	patterns := [...]uint64{0x3c00, 0x3f80, 0xc780, 0x4248}
	for _, p := range patterns {
		if len(bits) == 1 {
			p >>= 8 // 0x3c, 0x3f, 0xc7, 0x42
			bits[0] = byte(p)
		} else {
			binary.NativeEndian.PutUint16(bits, uint16(p))
		}
		if v, err := ToFloat64(d, p); err != nil || float64(read()) != v {
			return false
		}
	}
	return true
}

package dtype

import (
	"fmt"
	"math"

	"github.com/tutti-go/tutti/internal/convert"
)

// FromFloat64 returns the bits of one element of type d that holds v, in the
// low-order Size() bytes, rounded once:
//
//   - floats round to nearest even; a NaN stays a NaN; overflow gives an
//     infinity in F32, F16 and BF16 and the largest number in the FP8 types
//     (the saturating mode of OFP8);
//   - integers round to nearest even and saturate at the limits of the type;
//     a NaN becomes 0;
//   - Bool is 1 unless v is 0 (a NaN is not 0).
//
// The only error is an invalid DType.
func FromFloat64(d DType, v float64) (bits uint64, err error) {
	switch d {
	case F64:
		return math.Float64bits(v), nil
	case F32:
		return uint64(math.Float32bits(float32(v))), nil
	case F16:
		return uint64(convert.Binary16.Encode(v)), nil
	case BF16:
		return uint64(convert.BFloat16.Encode(v)), nil
	case FP8E4M3:
		return uint64(convert.E4M3.Encode(v)), nil
	case FP8E5M2:
		return uint64(convert.E5M2.Encode(v)), nil
	case I64:
		return uint64(toInt[int64](v)), nil
	case I32:
		return uint64(uint32(toInt[int32](v))), nil
	case I16:
		return uint64(uint16(toInt[int16](v))), nil
	case I8:
		return uint64(uint8(toInt[int8](v))), nil
	case U64:
		return toInt[uint64](v), nil
	case U32:
		return uint64(toInt[uint32](v)), nil
	case U16:
		return uint64(toInt[uint16](v)), nil
	case U8:
		return uint64(toInt[uint8](v)), nil
	case Bool:
		if v != 0 {
			return 1, nil
		}
		return 0, nil
	}
	return 0, errInvalid(d)
}

// ToFloat64 returns the value of one element of type d, given its bits as
// [FromFloat64] returns them. It is exact except for I64 and U64 beyond 2^53,
// which round to nearest even. A Bool is 1 when its byte is not zero.
func ToFloat64(d DType, bits uint64) (float64, error) {
	switch d {
	case F64:
		return math.Float64frombits(bits), nil
	case F32:
		return float64(math.Float32frombits(uint32(bits))), nil
	case F16:
		return float64(convert.Binary16.Decode(uint32(bits))), nil
	case BF16:
		return float64(convert.BFloat16.Decode(uint32(bits))), nil
	case FP8E4M3:
		return float64(convert.E4M3.Decode(uint32(bits))), nil
	case FP8E5M2:
		return float64(convert.E5M2.Decode(uint32(bits))), nil
	case I64:
		return float64(int64(bits)), nil
	case I32:
		return float64(int32(bits)), nil
	case I16:
		return float64(int16(bits)), nil
	case I8:
		return float64(int8(bits)), nil
	case U64:
		return float64(bits), nil
	case U32:
		return float64(uint32(bits)), nil
	case U16:
		return float64(uint16(bits)), nil
	case U8:
		return float64(uint8(bits)), nil
	case Bool:
		if bits&0xff != 0 {
			return 1, nil
		}
		return 0, nil
	}
	return 0, errInvalid(d)
}

// integer is the integer part of [Element].
type integer interface {
	int64 | int32 | int16 | int8 | uint64 | uint32 | uint16 | uint8
}

// intRange holds the limits of an integer type.
type intRange[T integer] struct{ lowest, highest T }

func rangeOf[T integer]() intRange[T] {
	ones := ^T(0)
	if ones > 0 {
		return intRange[T]{0, ones}
	}
	// The sign bit alone: shift a one until it turns the number negative.
	sign := T(1)
	for sign > 0 {
		sign <<= 1
	}
	return intRange[T]{sign, ^sign}
}

// round rounds to nearest even and saturates; NaN becomes 0.
func (r intRange[T]) round(v float64) T {
	v = math.RoundToEven(v)
	switch {
	case v != v:
		return 0
	case v <= float64(r.lowest):
		return r.lowest
	case v >= float64(r.highest): // for 64 bits this is the limit rounded up
		return r.highest
	}
	return T(v)
}

func toInt[T integer](v float64) T {
	return rangeOf[T]().round(v)
}

func errInvalid(d DType) error {
	return fmt.Errorf("dtype: DType(%d) is not an element type", uint8(d))
}

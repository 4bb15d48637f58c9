package dtype

import "github.com/x448/float16"

// Element is the set of Go types that represent one element: the constraint
// of generic functions over typed host data. There is one type per [DType];
// [Of] maps between them.
type Element interface {
	float64 | float32 | float16.Float16 | BFloat16 | Float8E4M3 | Float8E5M2 |
		int64 | int32 | int16 | int8 | uint64 | uint32 | uint16 | uint8 | bool
}

// Of returns the DType whose elements the Go type T represents.
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
	return Invalid
}

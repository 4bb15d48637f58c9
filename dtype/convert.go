package dtype

import (
	"fmt"
	"unsafe"

	"github.com/tutti-go/tutti/internal/convert"
)

// ToFloat32 converts len(dst) elements of type d, in native byte order, to
// float32. src must hold exactly as many. Floats narrower than 32 bits convert
// exactly; F64 and integers round to nearest even (an F64 beyond the range of
// float32 becomes infinite); Bool gives 0 or 1. A NaN stays a NaN.
func ToFloat32(dst []float32, src []byte, d DType) error {
	if err := checkConvert(d, len(src), len(dst)); err != nil {
		return err
	}
	switch d {
	case F64:
		widen(dst, view[float64](src))
	case F32:
		copy(dst, view[float32](src))
	case F16:
		convert.F16ToF32(dst, view[uint16](src))
	case BF16:
		convert.BF16ToF32(dst, view[uint16](src))
	case FP8E4M3:
		for i, v := range src {
			dst[i] = e4m3Values[v]
		}
	case FP8E5M2:
		for i, v := range src {
			dst[i] = e5m2Values[v]
		}
	case I64:
		widen(dst, view[int64](src))
	case I32:
		widen(dst, view[int32](src))
	case I16:
		widen(dst, view[int16](src))
	case I8:
		widen(dst, view[int8](src))
	case U64:
		widen(dst, view[uint64](src))
	case U32:
		widen(dst, view[uint32](src))
	case U16:
		widen(dst, view[uint16](src))
	case U8:
		widen(dst, src)
	case Bool:
		for i, v := range src {
			dst[i] = 0
			if v != 0 {
				dst[i] = 1
			}
		}
	}
	return nil
}

// FromFloat32 converts the elements of src to type d, in native byte order.
// dst must hold exactly as many. Rounding, saturation and NaN are as
// [FromFloat64] says.
func FromFloat32(dst []byte, d DType, src []float32) error {
	if err := checkConvert(d, len(dst), len(src)); err != nil {
		return err
	}
	switch d {
	case F64:
		for i, out := 0, view[float64](dst); i < len(src); i++ {
			out[i] = float64(src[i])
		}
	case F32:
		copy(view[float32](dst), src)
	case F16:
		convert.F32ToF16(view[uint16](dst), src)
	case BF16:
		convert.F32ToBF16(view[uint16](dst), src)
	case FP8E4M3:
		convert.F32ToE4M3(dst, src)
	case FP8E5M2:
		convert.F32ToE5M2(dst, src)
	case I64:
		round(view[int64](dst), src)
	case I32:
		round(view[int32](dst), src)
	case I16:
		round(view[int16](dst), src)
	case I8:
		round(view[int8](dst), src)
	case U64:
		round(view[uint64](dst), src)
	case U32:
		round(view[uint32](dst), src)
	case U16:
		round(view[uint16](dst), src)
	case U8:
		round(dst, src)
	case Bool:
		for i, v := range src {
			dst[i] = 0
			if v != 0 {
				dst[i] = 1
			}
		}
	}
	return nil
}

func checkConvert(d DType, bytes, elements int) error {
	if !d.Valid() {
		return errInvalid(d)
	}
	if bytes/d.Size() != elements || bytes%d.Size() != 0 {
		return fmt.Errorf("dtype: %d bytes do not hold %d elements of %s (%d bytes each)", bytes, elements, d, d.Size())
	}
	return nil
}

func widen[T integer | float64](dst []float32, src []T) {
	for i, v := range src {
		dst[i] = float32(v)
	}
}

func round[T integer](dst []T, src []float32) {
	limits := rangeOf[T]()
	for i, v := range src {
		dst[i] = limits.round(float64(v))
	}
}

// view reads bytes as elements, in place. Both processors that this module
// supports load and store elements at any address.
func view[T any](b []byte) []T {
	var zero T
	return unsafe.Slice(
		(*T)(unsafe.Pointer(unsafe.SliceData(b))),
		len(b)/int(unsafe.Sizeof(zero)),
	)
}

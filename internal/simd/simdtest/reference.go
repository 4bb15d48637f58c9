package simdtest

import (
	"math"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/dtype"
)

// The reference computes one element at a time, on bits that are widened to uint64, and shares no code with the code
// under test.

// IsNaN reports whether any of the elements is a NaN.
func IsNaN(k dtype.DType, elements ...uint64) bool {
	return slices.ContainsFunc(elements, func(bits uint64) bool {
		return math.IsNaN(Decode(k, bits))
	})
}

// QuietNaN returns the positive NaN in which only the quiet bit of the mantissa is set.
func QuietNaN(k dtype.DType) uint64 {
	return [...]uint64{
		dtype.F64:     0x7ff8 << 48,
		dtype.F32:     0x7fc00000,
		dtype.F16:     0x7e00,
		dtype.BF16:    0x7fc0,
		dtype.FP8E4M3: 0x7f,
		dtype.FP8E5M2: 0x7e,
	}[k]
}

// Decode returns the value of the bits of a float.
func Decode(k dtype.DType, bits uint64) float64 {
	switch k {
	case dtype.F64:
		return math.Float64frombits(bits)
	case dtype.F32:
		return float64(math.Float32frombits(uint32(bits)))
	case dtype.F16:
		return decodeSmall(bits, 5, 10)
	case dtype.BF16:
		return decodeSmall(bits, 8, 7)
	case dtype.FP8E5M2:
		return decodeSmall(bits, 5, 2)
	}
	// Without infinities, the largest exponent is an ordinary one.
	switch bits & 0x7f {
	case 0x7f:
		return math.NaN()
	case 0x78, 0x79, 0x7a, 0x7b, 0x7c, 0x7d, 0x7e:
		return 2 * decodeSmall(bits-0x08, 4, 3)
	}
	return decodeSmall(bits, 4, 3)
}

// decodeSmall decodes a format with sign, exponent and mantissa by the definition of IEEE 754.
func decodeSmall(bits uint64, exponentBits, mantissaBits int) float64 {
	bias := 1<<(exponentBits-1) - 1
	exponent := int(bits>>mantissaBits) & (1<<exponentBits - 1)
	mantissa := float64(bits & (1<<mantissaBits - 1))
	var v float64
	switch {
	case exponent == 1<<exponentBits-1 && mantissa != 0:
		return math.NaN()
	case exponent == 1<<exponentBits-1:
		v = math.Inf(1)
	case exponent == 0:
		v = math.Ldexp(mantissa, 1-bias-mantissaBits)
	default:
		v = math.Ldexp(mantissa+float64(int(1)<<mantissaBits), exponent-bias-mantissaBits)
	}
	if bits>>(exponentBits+mantissaBits) != 0 {
		v = math.Copysign(v, -1)
	}
	return v
}

// Encode returns the bits of the float nearest to a number.
func Encode(k dtype.DType, v float64) uint64 {
	switch k {
	case dtype.F64:
		return math.Float64bits(v)
	case dtype.F32:
		return uint64(math.Float32bits(float32(v)))
	}
	return Nearest(k, v)
}

// magnitudes returns the values of a small format's non-negative bit patterns in ascending order, up to infinity or,
// in a format that saturates, up to the largest number. Infinity is replaced by the power of two that follows the
// largest number, because IEEE 754 rounds overflow that way.
var magnitudes = map[dtype.DType]func() []float64{
	dtype.F16:     sync.OnceValue(func() []float64 { return ascending(dtype.F16, 0x7c00) }),
	dtype.BF16:    sync.OnceValue(func() []float64 { return ascending(dtype.BF16, 0x7f80) }),
	dtype.FP8E4M3: sync.OnceValue(func() []float64 { return ascending(dtype.FP8E4M3, 0x7e) }),
	dtype.FP8E5M2: sync.OnceValue(func() []float64 { return ascending(dtype.FP8E5M2, 0x7b) }),
}

func ascending(k dtype.DType, last uint64) []float64 {
	values := make([]float64, last+1)
	for bits := range values {
		values[bits] = Decode(k, uint64(bits))
	}
	if math.IsInf(values[last], 1) {
		values[last] = 2 * math.Ldexp(1, math.Ilogb(values[last-1]))
	}
	return values
}

// Nearest finds the nearest value of a small format by a search of all values. Ties go to the even pattern.
func Nearest(k dtype.DType, v float64) uint64 {
	sign := uint64(0)
	if math.Signbit(v) {
		sign = 1 << (8*k.Size() - 1)
	}
	values := magnitudes[k]()
	next, _ := slices.BinarySearch(values, math.Abs(v))
	if next == len(values) {
		return sign | uint64(next-1)
	}
	if next == 0 || values[next] == math.Abs(v) {
		return sign | uint64(next)
	}
	toLower := math.Abs(v) - values[next-1]
	toHigher := values[next] - math.Abs(v)
	if toLower < toHigher || toLower == toHigher && next%2 == 1 {
		return sign | uint64(next-1)
	}
	return sign | uint64(next)
}

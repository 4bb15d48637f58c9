package simd

import (
	"math"
	"slices"
	"sync"
)

// The reference implementation computes one element at a time, on bits that
// are widened to uint64, and shares no code with the package.

var kindNames = [numKinds]string{
	"f64", "f32", "f16", "bf16", "fp8e4m3", "fp8e5m2", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool",
}

var opNames = [numOps]string{"add", "mul", "min", "max", "avg"}

func isFloat(k Kind) bool  { return k <= FP8E5M2 }
func isSigned(k Kind) bool { return k >= I64 && k <= I8 }

// refReduce combines the bits of elements, one of each source.
func refReduce(k Kind, op Op, sources []uint64) uint64 {
	if len(sources) == 1 && k != Bool {
		return sources[0]
	}
	switch {
	case k == Bool:
		return refBool(op, sources)
	case isFloat(k):
		return refFloat(k, op, sources)
	}
	return refInteger(k, op, sources)
}

func refBool(op Op, sources []uint64) uint64 {
	isTrue := func(b uint64) bool { return b != 0 }
	isFalse := func(b uint64) bool { return b == 0 }
	result := slices.ContainsFunc(sources, isTrue)
	if op == OpMul || op == OpMin {
		result = !slices.ContainsFunc(sources, isFalse)
	}
	if result {
		return 1
	}
	return 0
}

func refInteger(k Kind, op Op, sources []uint64) uint64 {
	unused := 64 - 8*k.Size()
	less := func(a, b uint64) bool { return a<<unused < b<<unused }
	if isSigned(k) {
		less = func(a, b uint64) bool { return int64(a<<unused) < int64(b<<unused) }
	}
	acc := sources[0]
	for _, next := range sources[1:] {
		switch {
		case op == OpAdd:
			acc += next
		case op == OpMul:
			acc *= next
		case op == OpMin && less(next, acc), op == OpMax && less(acc, next):
			acc = next
		}
	}
	return acc << unused >> unused
}

// refFloat accumulates in float64, rounding to the precision of the
// accumulator after every step: for float32 that gives the same as float32
// arithmetic, because 53 >= 2*24+2 bits.
func refFloat(k Kind, op Op, sources []uint64) uint64 {
	round := func(v float64) float64 { return float64(float32(v)) }
	if k == F64 {
		round = func(v float64) float64 { return v }
	}
	acc := refDecode(k, sources[0])
	for _, bits := range sources[1:] {
		next := refDecode(k, bits)
		switch op {
		case OpAdd, OpAvg:
			acc = round(acc + next)
		case OpMul:
			acc = round(acc * next)
		case OpMin:
			acc = math.Min(acc, next)
		case OpMax:
			acc = math.Max(acc, next)
		}
		// math.Min prefers an infinity to a NaN.
		if (op == OpMin || op == OpMax) && (acc != acc || next != next || isNaNBits(k, sources...)) {
			acc = math.NaN()
		}
	}
	if op == OpAvg {
		acc = round(acc / float64(len(sources)))
	}
	if acc != acc {
		return refQuietNaN(k)
	}
	return refEncode(k, acc)
}

func isNaNBits(k Kind, elements ...uint64) bool {
	return slices.ContainsFunc(elements, func(bits uint64) bool { return math.IsNaN(refDecode(k, bits)) })
}

func refQuietNaN(k Kind) uint64 {
	return [...]uint64{F64: 0x7ff8 << 48, F32: 0x7fc00000, F16: 0x7e00, BF16: 0x7fc0, FP8E4M3: 0x7f, FP8E5M2: 0x7e}[k]
}

func refDecode(k Kind, bits uint64) float64 {
	switch k {
	case F64:
		return math.Float64frombits(bits)
	case F32:
		return float64(math.Float32frombits(uint32(bits)))
	case F16:
		return refDecodeSmall(bits, 5, 10)
	case BF16:
		return refDecodeSmall(bits, 8, 7)
	case FP8E5M2:
		return refDecodeSmall(bits, 5, 2)
	}
	// Without infinities, the uppermost exponent is one like the others.
	switch bits & 0x7f {
	case 0x7f:
		return math.NaN()
	case 0x78, 0x79, 0x7a, 0x7b, 0x7c, 0x7d, 0x7e:
		return 2 * refDecodeSmall(bits-0x08, 4, 3)
	}
	return refDecodeSmall(bits, 4, 3)
}

// refDecodeSmall reads a format of a sign, exponent and mantissa by the
// definition of IEEE 754.
func refDecodeSmall(bits uint64, exponentBits, mantissaBits int) float64 {
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

func refEncode(k Kind, v float64) uint64 {
	switch k {
	case F64:
		return math.Float64bits(v)
	case F32:
		return uint64(math.Float32bits(float32(v)))
	}
	return refNearest(k, v)
}

// refMagnitudes returns the values of the non-negative bit patterns of a small
// format up to infinity or, in a format that saturates, up to the largest
// number; they ascend with the pattern. Infinity is replaced by the power of
// two that follows the largest number, since that is how IEEE 754 rounds
// overflow.
var refMagnitudes = map[Kind]func() []float64{
	F16:     sync.OnceValue(func() []float64 { return refAscending(F16, 0x7c00) }),
	BF16:    sync.OnceValue(func() []float64 { return refAscending(BF16, 0x7f80) }),
	FP8E4M3: sync.OnceValue(func() []float64 { return refAscending(FP8E4M3, 0x7e) }),
	FP8E5M2: sync.OnceValue(func() []float64 { return refAscending(FP8E5M2, 0x7b) }),
}

func refAscending(k Kind, last uint64) []float64 {
	values := make([]float64, last+1)
	for bits := range values {
		values[bits] = refDecode(k, uint64(bits))
	}
	if math.IsInf(values[last], 1) {
		values[last] = 2 * math.Ldexp(1, math.Ilogb(values[last-1]))
	}
	return values
}

// refNearest finds the nearest value of a small format by searching all of
// them; of two that are equally near, the one with an even pattern.
func refNearest(k Kind, v float64) uint64 {
	sign := uint64(0)
	if math.Signbit(v) {
		sign = 1 << (8*k.Size() - 1)
	}
	values := refMagnitudes[k]()
	above, _ := slices.BinarySearch(values, math.Abs(v))
	if above == len(values) {
		return sign | uint64(above-1)
	}
	if above == 0 || values[above] == math.Abs(v) {
		return sign | uint64(above)
	}
	toBelow, toAbove := math.Abs(v)-values[above-1], values[above]-math.Abs(v)
	if toBelow < toAbove || toBelow == toAbove && above%2 == 1 {
		return sign | uint64(above-1)
	}
	return sign | uint64(above)
}

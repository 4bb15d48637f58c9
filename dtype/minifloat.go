package dtype

import "math"

// BFloat16 is one BF16 element: the upper half of an IEEE 754 binary32.
type BFloat16 uint16

// Float8E4M3 is one FP8E4M3 element as the OCP 8-bit Floating Point
// Specification (OFP8) revision 1.0 defines it: bias 7, largest number 448, no
// infinities, NaN is S.1111.111. Other sources call it E4M3FN.
type Float8E4M3 uint8

// Float8E5M2 is one FP8E5M2 element of OFP8 revision 1.0: bias 15, largest
// number 57344, infinities and NaNs as in IEEE 754.
type Float8E5M2 uint8

// BFloat16FromFloat32 rounds to nearest even. A NaN stays a NaN (quiet, with
// its sign and the upper bits of its payload); numbers that round beyond the
// largest one become infinite, as IEEE 754 prescribes.
func BFloat16FromFloat32(v float32) BFloat16 { return BFloat16(bfloat16.encode(float64(v))) }

// Float8E4M3FromFloat32 rounds to nearest even in the saturating mode of
// OFP8: what overflows, and an infinity, becomes ±448; a NaN stays a NaN.
func Float8E4M3FromFloat32(v float32) Float8E4M3 { return Float8E4M3(e4m3.encode(float64(v))) }

// Float8E5M2FromFloat32 rounds to nearest even in the saturating mode of
// OFP8: what overflows, and an infinity, becomes ±57344; a NaN stays a
// NaN. So no conversion produces the infinities of the type, but one that is
// already there reads as an infinity.
func Float8E5M2FromFloat32(v float32) Float8E5M2 { return Float8E5M2(e5m2.encode(float64(v))) }

// Float32 returns the value; every BFloat16 is exactly a float32.
func (b BFloat16) Float32() float32 { return math.Float32frombits(uint32(b) << 16) }

// Float32 returns the value; every Float8E4M3 is exactly a float32.
func (f Float8E4M3) Float32() float32 { return e4m3Values[f] }

// Float32 returns the value; every Float8E5M2 is exactly a float32.
func (f Float8E5M2) Float32() float32 { return e5m2Values[f] }

// minifloat describes a binary format narrower than binary32 made of a sign,
// an exponent biased by 2^(expBits-1)-1 and a mantissa, with subnormals.
type minifloat struct {
	expBits, manBits int
	// finiteTop: the all-ones exponent holds numbers too, except the all-ones
	// mantissa, which is NaN; there are no infinities (E4M3).
	finiteTop bool
	// saturate: overflow and infinities become the largest number.
	saturate bool
}

var (
	binary16 = minifloat{expBits: 5, manBits: 10}
	bfloat16 = minifloat{expBits: 8, manBits: 7}
	e4m3     = minifloat{expBits: 4, manBits: 3, finiteTop: true, saturate: true}
	e5m2     = minifloat{expBits: 5, manBits: 2, saturate: true}

	e4m3Values = e4m3.values()
	e5m2Values = e5m2.values()
)

func (f minifloat) bias() int { return 1<<(f.expBits-1) - 1 }

// infinity is the bit pattern of +Inf, or what would be it.
func (f minifloat) infinity() uint64 { return (1<<f.expBits - 1) << f.manBits }

// largest is the bit pattern of the largest number.
func (f minifloat) largest() uint64 {
	if f.finiteTop {
		return f.infinity() | (1<<f.manBits - 2)
	}
	return f.infinity() - 1
}

// Layout of the source format, binary64.
const (
	manBits64 = 52
	bias64    = 1023
)

// encode rounds v to the format, to nearest even, and returns the bits. Going
// from float64 directly avoids rounding twice; a float32 widens exactly.
func (f minifloat) encode(v float64) uint64 {
	bits := math.Float64bits(v)
	sign := bits >> 63 << (f.expBits + f.manBits)
	mantissa := bits & (1<<manBits64 - 1)
	exponent := int(bits>>manBits64&0x7ff) - bias64

	if v != v {
		return sign | f.nan(mantissa)
	}
	if exponent > bias64 {
		return sign | f.overflow()
	}
	// A subnormal result has fewer mantissa bits, by how far the exponent lies
	// below the smallest normal one. What is shifted out altogether is less
	// than half of the smallest number. (Subnormal float64 are far below it.)
	shift := manBits64 - f.manBits
	magnitude := uint64(0)
	if smallest := 1 - f.bias(); exponent < smallest {
		shift += smallest - exponent
		if shift > manBits64+1 {
			return sign
		}
	} else {
		magnitude = uint64(exponent-smallest) << f.manBits
	}
	// The implicit leading one adds the missing 1 to the exponent field, and a
	// carry of the rounding moves on into the exponent as it should.
	mantissa |= 1 << manBits64
	odd := mantissa >> shift & 1
	magnitude += (mantissa + 1<<(shift-1) - 1 + odd) >> shift
	if magnitude > f.largest() {
		return sign | f.overflow()
	}
	return sign | magnitude
}

func (f minifloat) overflow() uint64 {
	if f.saturate {
		return f.largest()
	}
	return f.infinity()
}

// nan returns a quiet NaN that keeps the upper payload bits of a binary64 one.
func (f minifloat) nan(mantissa uint64) uint64 {
	if f.finiteTop {
		return f.infinity() | (1<<f.manBits - 1)
	}
	return f.infinity() | 1<<(f.manBits-1) | mantissa>>(manBits64-f.manBits)
}

// decode returns the value of the bits, exactly.
func (f minifloat) decode(bits uint64) float64 {
	mantissa := bits & (1<<f.manBits - 1)
	exponent := int(bits >> f.manBits & (1<<f.expBits - 1))
	sign := bits >> (f.expBits + f.manBits) & 1 << 63

	magnitude := bits & (1<<(f.expBits+f.manBits) - 1)
	switch {
	case magnitude > f.largest() && (f.finiteTop || mantissa != 0):
		return math.Float64frombits(sign | 0x7ff8<<48 | mantissa<<(manBits64-f.manBits))
	case magnitude > f.largest():
		return math.Float64frombits(sign | 0x7ff<<manBits64)
	case exponent == 0:
		smallest := math.Ldexp(float64(mantissa), 1-f.bias()-f.manBits)
		return math.Float64frombits(sign | math.Float64bits(smallest))
	}
	exponent += bias64 - f.bias()
	return math.Float64frombits(sign | uint64(exponent)<<manBits64 | mantissa<<(manBits64-f.manBits))
}

// values tabulates an 8-bit format.
func (f minifloat) values() (table [256]float32) {
	for bits := range table {
		table[bits] = float32(f.decode(uint64(bits)))
	}
	return table
}

package dtype

import (
	"math"

	"github.com/tutti-go/tutti/internal/convert"
)

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
func BFloat16FromFloat32(v float32) BFloat16 {
	return BFloat16(convert.BFloat16.Encode(float64(v)))
}

// Float8E4M3FromFloat32 rounds to nearest even in the saturating mode of
// OFP8: what overflows, and an infinity, becomes ±448; a NaN stays a NaN.
func Float8E4M3FromFloat32(v float32) Float8E4M3 {
	return Float8E4M3(convert.E4M3.Encode(float64(v)))
}

// Float8E5M2FromFloat32 rounds to nearest even in the saturating mode of
// OFP8: what overflows, and an infinity, becomes ±57344; a NaN stays a
// NaN. So no conversion produces the infinities of the type, but one that is
// already there reads as an infinity.
func Float8E5M2FromFloat32(v float32) Float8E5M2 {
	return Float8E5M2(convert.E5M2.Encode(float64(v)))
}

// Float32 returns the value; every BFloat16 is exactly a float32.
func (b BFloat16) Float32() float32 { return math.Float32frombits(uint32(b) << 16) }

// Float32 returns the value; every Float8E4M3 is exactly a float32.
func (f Float8E4M3) Float32() float32 { return e4m3Values[f] }

// Float32 returns the value; every Float8E5M2 is exactly a float32.
func (f Float8E5M2) Float32() float32 { return e5m2Values[f] }

var (
	e4m3Values = values(convert.E4M3)
	e5m2Values = values(convert.E5M2)
)

// values tabulates an 8-bit format.
func values(f *convert.Format) (table [256]float32) {
	for bits := range table {
		table[bits] = f.Decode(uint32(bits))
	}
	return table
}

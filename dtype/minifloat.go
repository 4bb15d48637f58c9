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

// Round returns the value of type T that is nearest to v, the even one of two. A NaN stays a NaN (in BF16 quiet, with
// its sign and the upper bits of its payload).
//
// A value that rounds beyond the largest number becomes infinite in BF16, as IEEE 754 prescribes. The FP8 types
// saturate, as OFP8 calls it: an overflow or an infinity becomes the largest number, 448 in E4M3 and 57344 in E5M2.
// So no conversion produces the infinities of E5M2, but one that is already there reads as an infinity.
func Round[T BFloat16 | Float8E4M3 | Float8E5M2](v float32) T {
	var format *convert.Format
	switch any(*new(T)).(type) {
	case BFloat16:
		format = convert.BFloat16
	case Float8E4M3:
		format = convert.E4M3
	case Float8E5M2:
		format = convert.E5M2
	}
	return T(format.Encode(float64(v)))
}

// Float32 returns the value; every BFloat16 is exactly a float32.
func (b BFloat16) Float32() float32 {
	return math.Float32frombits(uint32(b) << 16)
}

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

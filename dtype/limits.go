package dtype

import "math"

// Limits are the numeric limits of an element type, as float64. They are exact
// but for the Max of I64 and U64, which round up to 2^63 and 2^64; converting
// them back ([FromFloat64]) saturates to the true limit.
type Limits struct {
	Max             float64 // largest finite number
	Lowest          float64 // most negative finite number
	Epsilon         float64 // distance from 1 to the next larger number; 0 for Bool
	SmallestNormal  float64 // smallest positive number with full precision
	SmallestNonzero float64 // smallest positive number, subnormals included
}

var limits = [numTypes]Limits{
	F64: {
		Max: math.MaxFloat64, Lowest: -math.MaxFloat64, Epsilon: 0x1p-52,
		SmallestNormal: 0x1p-1022, SmallestNonzero: math.SmallestNonzeroFloat64,
	},
	F32: {
		Max: math.MaxFloat32, Lowest: -math.MaxFloat32, Epsilon: 0x1p-23,
		SmallestNormal: 0x1p-126, SmallestNonzero: math.SmallestNonzeroFloat32,
	},
	F16:     binary16.limits(),
	BF16:    bfloat16.limits(),
	FP8E4M3: e4m3.limits(),
	FP8E5M2: e5m2.limits(),
	I64:     limitsOfInt[int64](),
	I32:     limitsOfInt[int32](),
	I16:     limitsOfInt[int16](),
	I8:      limitsOfInt[int8](),
	U64:     limitsOfInt[uint64](),
	U32:     limitsOfInt[uint32](),
	U16:     limitsOfInt[uint16](),
	U8:      limitsOfInt[uint8](),
	Bool:    {Max: 1, SmallestNormal: 1, SmallestNonzero: 1},
}

// Limits returns the numeric limits of d, zeros for an invalid DType.
func (d DType) Limits() Limits {
	if !d.Valid() {
		return Limits{}
	}
	return limits[d]
}

func (f minifloat) limits() Limits {
	largest := f.decode(f.largest())
	return Limits{
		Max:             largest,
		Lowest:          -largest,
		Epsilon:         math.Ldexp(1, -f.manBits),
		SmallestNormal:  math.Ldexp(1, 1-f.bias()),
		SmallestNonzero: f.decode(1),
	}
}

func limitsOfInt[T integer]() Limits {
	limits := rangeOf[T]()
	return Limits{
		Max:             float64(limits.highest),
		Lowest:          float64(limits.lowest),
		Epsilon:         1,
		SmallestNormal:  1,
		SmallestNonzero: 1,
	}
}

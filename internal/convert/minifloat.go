package convert

import "math"

// Parts of a float32.
const (
	signBit32      = 1 << 31
	quietBit32     = 1 << 22
	infBits32      = 0xff << mantissaBits32
	mantissaBits32 = 23
	bias32         = 127
)

// Format is a binary float format narrower than float32, with subnormal
// numbers: a sign, an exponent and mantissaBits bits of mantissa.
type Format struct {
	mantissaBits, bias uint32 // size of the mantissa, and bias of the exponent
	// Bit patterns: the sign bit, the largest number, infinity (0 if there is none) and the NaN with only the quiet
	// bit set. All patterns above the largest number, other than infinity, are NaNs.
	sign, largest, infinity, nan uint32
	// limit replaces greater magnitudes before they are rounded. It is the largest number if the format saturates, and
	// otherwise the power of two that rounds to the pattern of infinity.
	limit float32
}

// The formats.
var (
	Binary16 = &Format{
		mantissaBits: 10,
		bias:         15,
		sign:         0x8000,
		largest:      0x7bff,
		infinity:     0x7c00,
		nan:          0x7e00,
		limit:        65536,
	}
	BFloat16 = &Format{
		mantissaBits: 7,
		bias:         127,
		sign:         0x8000,
		largest:      0x7f7f,
		infinity:     0x7f80,
		nan:          0x7fc0,
		limit:        float32(math.Inf(1)),
	}
	E4M3 = &Format{
		mantissaBits: 3,
		bias:         7,
		sign:         0x80,
		largest:      0x7e,
		nan:          0x7f,
		limit:        448,
	}
	E5M2 = &Format{
		mantissaBits: 2,
		bias:         15,
		sign:         0x80,
		largest:      0x7b,
		infinity:     0x7c,
		nan:          0x7e,
		limit:        57344,
	}
)

// Decode returns the value of a pattern, exactly.
func (f *Format) Decode(pattern uint32) float32 {
	sign := uint32(0)
	if pattern&f.sign != 0 {
		sign = signBit32
	}
	magnitude := pattern & (f.sign - 1)
	// Shifted to their places in float32, the fields are the number, normal or subnormal, except for the bias of the
	// exponent.
	moved := magnitude << (mantissaBits32 - f.mantissaBits)
	switch {
	case magnitude <= f.largest:
		rebias := math.Float32frombits((2*bias32 - f.bias) << mantissaBits32)
		moved = math.Float32bits(math.Float32frombits(moved) * rebias)
	case magnitude == f.infinity:
		moved = infBits32
	default:
		moved |= infBits32 | quietBit32
	}
	return math.Float32frombits(sign | moved)
}

// Encode returns the pattern of the number nearest to v, with ties to even. It rounds once: the intermediate float32
// has at least two more bits than any format, and its last bit says whether lower bits were set (round to odd).
func (f *Format) Encode(v float64) uint32 {
	odd := float32(v)
	if exact := float64(odd); exact != v && v == v && math.Float32bits(odd)&1 == 0 {
		if bits := math.Float32bits(odd); math.Abs(exact) > math.Abs(v) {
			odd = math.Float32frombits(bits - 1)
		} else {
			odd = math.Float32frombits(bits + 1)
		}
	}
	return f.encode(odd)
}

// encode returns the pattern of the nearest number, with ties to even.
func (f *Format) encode(v float32) uint32 {
	bits := math.Float32bits(v)
	sign := bits >> 31 * f.sign
	magnitude := bits &^ signBit32
	shift := mantissaBits32 - f.mantissaBits
	if magnitude > infBits32 {
		return sign | f.nan | magnitude>>shift&(1<<f.mantissaBits-1)
	}
	magnitude = min(magnitude, math.Float32bits(f.limit))
	rebias := (bias32 - f.bias) << mantissaBits32
	if magnitude < rebias+1<<mantissaBits32 {
		// The result is subnormal. The unit in the last place of this power
		// of two is the unit of the subnormal numbers, so the addition rounds.
		magic := (bias32 + 1 - f.bias + shift) << mantissaBits32
		sum := math.Float32frombits(magnitude) + math.Float32frombits(magic)
		return sign | (math.Float32bits(sum) - magic)
	}
	// Add just under half a unit of the last kept bit, and that bit itself
	// for the ties. A carry moves into the exponent, where it belongs.
	odd := magnitude >> shift & 1
	return sign | (magnitude-rebias+1<<(shift-1)-1+odd)>>shift
}

// Package dtype names the element types of tensors, and converts and rounds elements.
//
// A [DType] says how an element is stored (its size in bytes) and how it is
// read (float, signed, unsigned, boolean). Backends always receive the DType
// and never guess it from the size: f16, bf16 and i16 are all two bytes wide,
// but reduce differently.
//
// [Of] maps Go types to DTypes, [Parse] reads names, [ToFloat32] and
// [FromFloat32] convert in bulk, [ToFloat64] and [FromFloat64] one element.
// All conversions round once, to nearest even, and keep a NaN a NaN; integers
// and the FP8 types saturate.
package dtype

// DType identifies an element type. The zero value is [Invalid], so a
// forgotten DType is caught by the first check that sees it.
type DType uint8

// The element types. F16 is IEEE 754 binary16, BF16 the upper half of
// binary32, and the two FP8 types are those of the OCP "8-bit Floating Point
// Specification (OFP8)", revision 1.0.
const (
	Invalid DType = iota
	F64
	F32
	F16
	BF16
	FP8E4M3
	FP8E5M2
	I64
	I32
	I16
	I8
	U64
	U32
	U16
	U8
	Bool
	numTypes
)

// info is what the package knows of one DType.
type info struct {
	name   string // as String has it
	size   int    // bytes of an element
	float  bool   // a floating-point type
	signed bool   // it has negative numbers
}

var infos = [numTypes]info{
	Invalid: {"invalid", 0, false, false},
	F64:     {"f64", 8, true, true},
	F32:     {"f32", 4, true, true},
	F16:     {"f16", 2, true, true},
	BF16:    {"bf16", 2, true, true},
	FP8E4M3: {"fp8e4m3", 1, true, true},
	FP8E5M2: {"fp8e5m2", 1, true, true},
	I64:     {"i64", 8, false, true},
	I32:     {"i32", 4, false, true},
	I16:     {"i16", 2, false, true},
	I8:      {"i8", 1, false, true},
	U64:     {"u64", 8, false, false},
	U32:     {"u32", 4, false, false},
	U16:     {"u16", 2, false, false},
	U8:      {"u8", 1, false, false},
	Bool:    {"bool", 1, false, false},
}

// Valid reports whether d is one of the fifteen element types.
func (d DType) Valid() bool {
	return d > Invalid && d < numTypes
}

// Size returns the size of one element in bytes, 0 for an invalid DType.
func (d DType) Size() int {
	if !d.Valid() {
		return 0
	}
	return infos[d].size
}

// IsFloat reports whether d is a floating-point type (8 to 64 bits).
func (d DType) IsFloat() bool {
	return d.Valid() && infos[d].float
}

// IsSigned reports whether d can hold negative numbers.
func (d DType) IsSigned() bool {
	return d.Valid() && infos[d].signed
}

// String returns the short lower-case name that [Parse] reads, such as "bf16".
func (d DType) String() string {
	if !d.Valid() {
		return infos[Invalid].name
	}
	return infos[d].name
}

// All returns the fifteen element types, in declaration order.
func All() []DType {
	all := make([]DType, 0, numTypes-1)
	for d := F64; d < numTypes; d++ {
		all = append(all, d)
	}
	return all
}

package simd

// The conversions handle min(len(dst), len(src)) elements; dst and src do not
// overlap. Widening is exact. Narrowing rounds to nearest, ties to even; what
// is too large becomes an infinity. A NaN stays a NaN: its sign and the upper
// bits of its payload are kept and its quiet bit is set.

// F16ToF32 converts IEEE 754 binary16 values, given as their bits, to float32.
func F16ToF32(dst []float32, src []uint16) {
	n := min(len(dst), len(src))
	f16ToF32(dst[:n], src[:n])
}

// F32ToF16 converts float32 values to the bits of IEEE 754 binary16 values.
func F32ToF16(dst []uint16, src []float32) {
	n := min(len(dst), len(src))
	f32ToF16(dst[:n], src[:n])
}

// BF16ToF32 converts bfloat16 values, given as their bits, to float32. It moves
// bits only: a signaling NaN stays one.
func BF16ToF32(dst []float32, src []uint16) {
	n := min(len(dst), len(src))
	bf16ToF32(dst[:n], src[:n])
}

// F32ToBF16 converts float32 values to the bits of bfloat16 values.
func F32ToBF16(dst []uint16, src []float32) {
	n := min(len(dst), len(src))
	f32ToBF16(dst[:n], src[:n])
}

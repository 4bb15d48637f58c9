// Package convert converts buffers of narrow floats to float32 and back. Package dtype, which defines the types,
// builds on it.
//
// The functions handle min(len(dst), len(src)) elements; dst and src must not overlap. Widening is exact. Narrowing
// rounds to nearest, ties to even; numbers that are too large become an infinity in binary16 and bfloat16, and the
// largest number in 8-bit types. A NaN stays a NaN: its sign and the upper bits of its payload are kept and its quiet
// bit is set.
package convert

import "github.com/tutti-go/tutti/internal/simd"

//go:generate env GOWORK=off go run -C ../simd/gen ./arith -of conversions -out ../../convert/avx2_amd64.s -stubs ../../convert/avx2_amd64.go -pkg convert

// F16ToF32 converts IEEE 754 binary16 values, given as their bits, to float32.
func F16ToF32(dst []float32, src []uint16) {
	n := min(len(dst), len(src))
	if simd.AVX2 {
		f16ToF32AVX2(dst[:n], src[:n])
	} else {
		f16ToF32Portable(dst[:n], src[:n])
	}
}

// F32ToF16 converts float32 values to the bits of IEEE 754 binary16 values.
func F32ToF16(dst []uint16, src []float32) {
	n := min(len(dst), len(src))
	if simd.AVX2 {
		f32ToF16AVX2(dst[:n], src[:n])
	} else {
		narrow(Binary16, dst[:n], src[:n])
	}
}

// BF16ToF32 converts bfloat16 values, given as their bits, to float32. It moves
// bits only: a signaling NaN stays one.
func BF16ToF32(dst []float32, src []uint16) {
	n := min(len(dst), len(src))
	if simd.AVX2 {
		bf16ToF32AVX2(dst[:n], src[:n])
	} else {
		bf16ToF32Portable(dst[:n], src[:n])
	}
}

// F32ToBF16 converts float32 values to the bits of bfloat16 values.
func F32ToBF16(dst []uint16, src []float32) {
	n := min(len(dst), len(src))
	if simd.AVX2 {
		f32ToBF16AVX2(dst[:n], src[:n])
	} else {
		f32ToBF16Portable(dst[:n], src[:n])
	}
}

// F32ToE4M3 converts float32 values to the bits of FP8E4M3 values.
func F32ToE4M3(dst []uint8, src []float32) {
	n := min(len(dst), len(src))
	if simd.AVX2 {
		f32ToE4M3AVX2(dst[:n], src[:n])
	} else {
		narrow(E4M3, dst[:n], src[:n])
	}
}

// F32ToE5M2 converts float32 values to the bits of FP8E5M2 values.
func F32ToE5M2(dst []uint8, src []float32) {
	n := min(len(dst), len(src))
	narrow(E5M2, dst[:n], src[:n])
}

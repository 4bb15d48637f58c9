package convert

import "github.com/tutti-go/tutti/internal/simd"

func f16ToF32(dst []float32, src []uint16) {
	if simd.AVX2 {
		f16ToF32AVX2(dst, src)
	} else {
		f16ToF32Portable(dst, src)
	}
}

func f32ToF16(dst []uint16, src []float32) {
	if simd.AVX2 {
		f32ToF16AVX2(dst, src)
	} else {
		f32ToF16Portable(dst, src)
	}
}

func bf16ToF32(dst []float32, src []uint16) {
	if simd.AVX2 {
		bf16ToF32AVX2(dst, src)
	} else {
		bf16ToF32Portable(dst, src)
	}
}

func f32ToBF16(dst []uint16, src []float32) {
	if simd.AVX2 {
		f32ToBF16AVX2(dst, src)
	} else {
		f32ToBF16Portable(dst, src)
	}
}

func f32ToE4M3(dst []uint8, src []float32) {
	if simd.AVX2 {
		f32ToE4M3AVX2(dst, src)
	} else {
		narrow(E4M3, dst, src)
	}
}

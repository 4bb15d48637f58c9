//go:build !amd64

package convert

// Other processors have no AVX2, so nothing calls these functions.

func f16ToF32AVX2([]float32, []uint16)  {}
func f32ToF16AVX2([]uint16, []float32)  {}
func bf16ToF32AVX2([]float32, []uint16) {}
func f32ToBF16AVX2([]uint16, []float32) {}
func f32ToE4M3AVX2([]uint8, []float32)  {}

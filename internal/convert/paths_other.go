//go:build !amd64

package convert

func f16ToF32(dst []float32, src []uint16)  { f16ToF32Portable(dst, src) }
func f32ToF16(dst []uint16, src []float32)  { f32ToF16Portable(dst, src) }
func bf16ToF32(dst []float32, src []uint16) { bf16ToF32Portable(dst, src) }
func f32ToBF16(dst []uint16, src []float32) { f32ToBF16Portable(dst, src) }
func f32ToE4M3(dst []uint8, src []float32)  { narrow(E4M3, dst, src) }

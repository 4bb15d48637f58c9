package simd

import "math"

func f16ToF32Portable(dst []float32, src []uint16) { widenMinifloats(F16, dst, src) }

func f32ToF16Portable(dst []uint16, src []float32) { narrowMinifloats(F16, dst, src) }

func bf16ToF32Portable(dst []float32, src []uint16) {
	dst = dst[:len(src)]
	for i, h := range src {
		dst[i] = math.Float32frombits(uint32(h) << 16)
	}
}

func f32ToBF16Portable(dst []uint16, src []float32) {
	dst = dst[:len(src)]
	for i, v := range src {
		bits := math.Float32bits(v)
		if v != v {
			dst[i] = uint16(bits>>16) | 1<<6
			continue
		}
		odd := bits >> 16 & 1
		dst[i] = uint16((bits + 0x7fff + odd) >> 16)
	}
}

// pattern holds the bits of one element of a kind of minifloat.
type pattern interface{ uint8 | uint16 }

func widenMinifloats[P pattern](k Kind, dst []float32, src []P) {
	format := &minifloats[k]
	dst = dst[:len(src)]
	for i, p := range src {
		dst[i] = format.decode(uint32(p))
	}
}

func narrowMinifloats[P pattern](k Kind, dst []P, src []float32) {
	format := &minifloats[k]
	dst = dst[:len(src)]
	for i, v := range src {
		dst[i] = P(format.encode(v))
	}
}

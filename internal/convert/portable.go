package convert

import "math"

func f16ToF32Portable(dst []float32, src []uint16) {
	dst = dst[:len(src)]
	for i, h := range src {
		dst[i] = Binary16.Decode(uint32(h))
	}
}

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

func narrow[P uint8 | uint16](to *Format, dst []P, src []float32) {
	dst = dst[:len(src)]
	for i, v := range src {
		dst[i] = P(to.encode(v))
	}
}

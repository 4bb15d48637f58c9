package quant

//go:generate env GOWORK=off go run -C ../../../../internal/simd/gen ./quant -out ../../../runtime/cpu/internal/quant/avx2_amd64.s -stubs ../../../runtime/cpu/internal/quant/avx2_amd64.go -pkg quant

import (
	"github.com/tutti-go/tutti/internal/simd"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The vectorized functions return how many leading values they handled: whole blocks, at most simd.Chunk bytes, none
// without AVX2.

const step = simd.Chunk / 4

func encodeBlocks(c kernel.Codec, codes, scales []byte, src, lost []float32) int {
	src = src[:min(len(src), step)&^(block-1)]
	if !simd.AVX2 || len(src) == 0 {
		return 0
	}
	switch c {
	case kernel.CodecI8:
		return block * quantizeI8AVX2(&codes[0], &scales[0], src, lost, 127)
	case kernel.CodecI4:
		return block * quantizeI4AVX2(&codes[0], &scales[0], src, lost, 7)
	case kernel.CodecSign:
		return block * quantizeSignAVX2(&codes[0], &scales[0], src, lost)
	}
	return 0
}

func decodeBlocks(c kernel.Codec, dst []float32, codes, scales []byte, add bool) int {
	dst = dst[:min(len(dst), step)&^(block-1)]
	if !simd.AVX2 || len(dst) == 0 {
		return 0
	}
	switch c {
	case kernel.CodecI8:
		return block * dequantizeI8AVX2(dst, &codes[0], &scales[0], add)
	case kernel.CodecI4:
		return block * dequantizeI4AVX2(dst, &codes[0], &scales[0], add)
	case kernel.CodecSign:
		return block * dequantizeSignAVX2(dst, &codes[0], &scales[0], add)
	case kernel.CodecI2:
		return block * dequantizeI2AVX2(dst[:min(len(dst), group)], &codes[0], &scales[0], add)
	}
	return 0
}

// sumGroup stores the partial sums of a whole group. It returns false if it cannot.
func sumGroup(x []float32, parts *partial) bool {
	if !simd.AVX2 || len(x) != group {
		return false
	}
	groupSumAVX2(&x[0], parts)
	return true
}

// centerGroup sets centered to the values of a group less shift, and parts to the partial sums of their squares.
func centerGroup(centered, x []float32, shift float32, parts *partial) {
	groupCenterAVX2(&centered[0], &x[0], shift, parts)
}

// binGroup stores the bins of a group, and the partial sums of each.
func binGroup(bins *[group]byte, centered []float32, scale float32, parts *[4]partial) {
	groupBinsAVX2(&bins[0], &centered[0], scale)
	groupBinSumsAVX2(&bins[0], &centered[0], parts)
}

// halveGroup stores the codes of a whole group of a list, and the partial sums of each. It returns false if it cannot.
func halveGroup(g *bins, x []float32, thresholds [2]uint32) bool {
	if !simd.AVX2 || len(x) != group {
		return false
	}
	groupHalvesAVX2(&g.codes[0], &x[0], thresholds[0], thresholds[1])
	groupBinSumsAVX2(&g.codes[0], &x[0], &g.parts)
	return true
}

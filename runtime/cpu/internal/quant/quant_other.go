//go:build !amd64

package quant

import "github.com/tutti-go/tutti/runtime/kernel"

func encodeBlocks(kernel.Codec, []byte, []byte, []float32, []float32) int { return 0 }

func decodeBlocks(kernel.Codec, []float32, []byte, []byte, bool) int { return 0 }

func sumGroup([]float32, *partial) bool { return false }

func centerGroup([]float32, []float32, float32, *partial) {}

func binGroup(*[group]byte, []float32, float32, *[4]partial) {}

func halveGroup(*bins, []float32, [2]uint32) bool { return false }

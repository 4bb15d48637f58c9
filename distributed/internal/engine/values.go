package engine

import (
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// codecs are the codecs of lists and of the dense pattern.
var codecs = map[string]kernel.Codec{
	sparsity.F32:      kernel.CodecNone,
	sparsity.Lossless: kernel.CodecF32,
	sparsity.BF16:     kernel.CodecBF16,
	sparsity.F16:      kernel.CodecF16,
	sparsity.FP8:      kernel.CodecFP8,
	sparsity.I8:       kernel.CodecI8,
	sparsity.I4:       kernel.CodecI4,
	sparsity.I2:       kernel.CodecI2,
	sparsity.Bit:      kernel.CodecSign,
}

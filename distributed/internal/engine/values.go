package engine

import "github.com/tutti-go/tutti/runtime/kernel"

// As what values travel, for [Config.Values]. Bytes are those of an entry where 1 % are selected, its index
// included.
const (
	F32      = "f32"      // as they are, and indices as well: 8 bytes, and nothing to encode
	Lossless = "lossless" // as they are, behind indices at their entropy: 5.0 bytes
	BF16     = "bf16"     // rounded to 8 bits of precision: 3.0
	F16      = "f16"      // rounded to 11 bits of precision, and to 65504: 3.0
	FP8      = "fp8"      // E4M3, scaled by blocks of 64: 2.1
	I8       = "i8"       // 8 bits, scaled by blocks of 64: 2.1
	I4       = "i4"       // 4 bits, scaled by blocks of 64: 1.6
	I2       = "i2"       // 2 bits, one of four bins of 4096 values, whose means travel: 1.3
	Bit      = "1bit"     // signs, and mean magnitudes of blocks of 64; for the dense pattern
)

// codecs are those that a list has, and the dense pattern.
var codecs = map[string]kernel.Codec{
	F32:      kernel.CodecNone,
	Lossless: kernel.CodecF32,
	BF16:     kernel.CodecBF16,
	F16:      kernel.CodecF16,
	FP8:      kernel.CodecFP8,
	I8:       kernel.CodecI8,
	I4:       kernel.CodecI4,
	I2:       kernel.CodecI2,
	Bit:      kernel.CodecSign,
}

// Values returns the names of what values travel as, from the most bytes to the least.
func Values() []string {
	return []string{F32, Lossless, BF16, F16, FP8, I8, I4, I2, Bit}
}

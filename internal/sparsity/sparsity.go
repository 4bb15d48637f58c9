// Package sparsity names the patterns and codecs of package sparse, for code that iterates over all of them: its
// engine, the command, and tests.
package sparsity

// The patterns. Package sparse describes them.
const (
	Dense           = "dense"           // sends everything
	TopkA           = "topkA"           // exact top-k, allgather
	TopkA2          = "topkA2"          // the same, and the top k of the sum
	TopkAopt        = "topkAopt"        // reused threshold, allgather
	Gtopk           = "gtopk"           // Shi et al., ICDCS 2019
	TopkSA          = "topkSA"          // the split allreduce of SparCML, Renggli et al., SC 2019
	Gaussiank       = "gaussiank"       // Shi et al., 2019
	GaussiankConcat = "gaussiankconcat" // the same; every list here is one message of indices and values
	GaussiankSA     = "gaussiankSA"     // the same selection, split allreduce
	Oktopk          = "oktopk"          // Li and Hoefler, PPoPP 2022
	Chunked         = "chunked"         // exact top-k of each chunk, allgather
)

// Auto is the pattern that the ranks choose by measuring which steps are fastest.
const Auto = "auto"

// Patterns returns the names of all patterns, dense first.
func Patterns() []string {
	return []string{Dense, TopkA, TopkA2, TopkAopt, Gtopk, TopkSA, Gaussiank, GaussiankConcat, GaussiankSA,
		Oktopk, Chunked}
}

// NeedsHost reports whether a step of a pattern waits for the device, if it has streams, because the host needs
// lengths to size messages. Other patterns only submit work, and can be captured in a graph unless a gradient that is
// not finite makes the host return an error. [Auto] may be any pattern. Not all steps of [Oktopk] wait, but the host's
// reads in one step determine the next, so no step can be captured.
func NeedsHost(pattern string) bool {
	switch pattern {
	case TopkSA, GaussiankSA, Oktopk, Auto:
		return true
	}
	return false
}

// The codecs of values, with the bytes of an entry at 1 % density, including its index.
const (
	F32      = "f32"      // unchanged, with plain indices: 8 bytes, nothing to encode
	Lossless = "lossless" // unchanged, with entropy-coded indices: 5.0 bytes
	BF16     = "bf16"     // rounded to 8 bits of precision: 3.0
	F16      = "f16"      // rounded to 11 bits of precision, and to 65504: 3.0
	FP8      = "fp8"      // E4M3, scaled by blocks of 64: 2.1
	I8       = "i8"       // 8 bits, scaled by blocks of 64: 2.1
	I4       = "i4"       // 4 bits, scaled by blocks of 64: 1.6
	I2       = "i2"       // 2 bits, one of four bins of 4096 values, whose means are sent: 1.3
	Bit      = "1bit"     // signs, and mean magnitudes of blocks of 64; for the dense pattern
)

// Values returns the names of the codecs, by decreasing size.
func Values() []string {
	return []string{F32, Lossless, BF16, F16, FP8, I8, I4, I2, Bit}
}

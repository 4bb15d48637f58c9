package pool

import "math/bits"

// alignment of every block.
const alignment = 64

// Granule is the alignment of mappings, so that one table entry per granule
// finds the mapping that an address lies in. It is the usual size of a huge
// page, and the granularity of GPU memory.
const Granule = 1 << granuleBits

const granuleBits = 21

// roundSize rounds a size up to its size class: a multiple of 64 bytes up to
// 512, and beyond that one of eight equal steps between powers of two, which
// bounds the waste to 1/8 of the request. bytes must be positive.
func roundSize(bytes int) (index, size int) {
	length := bits.Len(uint(bytes - 1))
	if length < 10 {
		index = (bytes - 1) / alignment
		return index, (index + 1) * alignment
	}
	shift := length - 4
	step := (bytes - 1) >> shift // 8 to 15
	return (length-9)*8 + step - 8, (step + 1) << shift
}

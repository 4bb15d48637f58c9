package kernel

import (
	"fmt"
	"math/bits"
	"sort"
)

// Codec is the format of values in a message: of a list, beside its indices ([Kernels.Encode]), or of a dense array
// ([Kernels.Quantize]).
//
// A list's message has these parts, one after the other. Integers are little-endian, of 32
// bits where nothing else is said; bits fill a byte from its lowest on. m is the number of
// entries.
//
//   - m, and the length of the message in bytes.
//   - For each group of 4096 entries: the index of its first entry, and the place of its
//     first block of indices, in bytes from the beginning of the message.
//   - For each block of 1024 entries: its header, 16 bits; then zeros to a multiple of 4 bytes.
//   - The values, as an array of m elements (see below).
//   - The blocks of indices, of whole bytes each.
//
// A block codes the gap before each of its entries: the number of indices between the
// entry before and this one, and 0 for the first entry of a group. (Of lists that do not
// ascend: that number modulo 2^31.) The header's lowest five bits are k, the sixth says
// that quotients are capped, the highest ten are u.
//
//   - The k lowest bits of each gap, packed, in whole bytes.
//   - u bytes with the quotients gap>>k: as many zeros and a one. If u is 0, there are
//     no quotients: gaps have k bits.
//   - In a capped block, a quotient q of 8 or more is written as 8. Behind the last quotient, q-7 of
//     each of these follows in Elias's gamma code: the number of its bits less one, as zeros and a one,
//     then its bits but the highest one, from the lowest on.
//
// Indices take 1 to 3 % more than their entropy, from a density of 0.1 % to 10 %. Groups can be decoded
// in any order, and in parallel. The k of an encoder is fixed, see [RiceParameter].
//
// An array of n values travels as its scales and then its codes, each filled up to a
// multiple of 4 bytes with zeros. Codes are packed, the first one in the lowest bits.
//
//   - [CodecF32], [CodecF16], [CodecBF16]: no scales. A finite value beyond the largest number is
//     that number.
//   - [CodecFP8], [CodecI8], [CodecI4]: one scale (BF16) for each block of 64 values: the largest
//     finite magnitude divided by the largest code (448, 127, 7) in F32 and rounded to BF16; the next
//     smaller one if the scale times the largest code is infinite, and 0 if it is below 2^-126.
//     A code is value * (1/scale), or value * 0 if the scale is 0, each rounded to F32, then rounded to
//     the nearest code, of two the even one, and not beyond the largest. The lowest integer (-128, -8),
//     or 0x7f of FP8E4M3, stands for what is not finite, a NaN from then on. A value is code * scale.
//   - [CodecI2]: a table of four F32 for each group of 4096 values, of which a code names one: the mean of
//     the values with that code (0 without any), in F64 and rounded to F32, so that a group keeps its sum. Sums
//     are in F64: of 256 partial sums, the i-th of values i, i+256, …, in order, the upper half is added to the
//     lower one until one is left. If a value is not finite, the table is four NaNs, and codes are 0. Codes of
//     lists and of arrays are chosen in two ways.
//     Of a list, which has no values near 0, codes 0 and 1 are the larger and the smaller magnitudes with a sign
//     bit, and 2 and 3 the smaller and the larger ones without. Magnitudes are told apart by the bar that they are
//     in, sixteen an octave: their bits >> 19, less 16*(e-7), where e is the exponent of the group's largest
//     magnitude as its bits have it, but not below 0. The larger ones of a sign begin at the bar that makes
//     s²/n + S²/N largest, of two the lower one, and at 0 if all are in one bar: n and N count the values with
//     that sign below it and from it on, s and S sum the middles of their bars, (33+2*(b mod 16)) << b/16 of
//     bar b. Squares, quotients and their sum are in F64.
//     Of an array, the codes are those of SparseLoCo's quantiser (Sarfi et al., "Communication Efficient LLM
//     Pre-training with SparseLoCo", 2025) with four bins over six standard deviations. Shift is the mean
//     of the values, a value less the shift is centered, std the square root of the sum of
//     their squares over count-1, each rounded to F32; scale is 6*std/4, or 1 if that is 0 or not finite.
//     The code is centered/scale+2, rounded to the nearest integer, of two the even one,
//     and not beyond 0 and 3. A table entry is the mean of the centered values with that code,
//     rounded to F32, plus shift, and not beyond the largest number.
//   - [CodecSign]: the magnitude (BF16) of each block of 64 values, which is their mean magnitude, and a
//     bit per value, 1 if its sign bit is set. The magnitude is a NaN if a value is not finite.
//     The mean is the sum of |value|/64 times 64/count, in F32: 64 terms (zeros behind the end), of
//     which the upper half is added to the lower one, element by element, until one is left.
//     Rounded to BF16 it is not beyond the largest number, and 0 if below 2^-126.
//
// The decoded values depend on the message alone, and are the same on every device.
type Codec uint8

// The codecs.
const (
	// CodecNone is the zero Codec: lists and arrays as they are in memory, 64 bits an entry. They are
	// sent without being encoded, which is best where the link is as fast as memory.
	CodecNone      Codec = iota
	CodecPositions       // indices without values
	CodecF32             // bit for bit
	CodecBF16
	CodecF16
	CodecFP8 // E4M3
	CodecI8
	CodecI4
	CodecI2
	CodecSign // one bit
	codecEnd
)

// Numbers of the format.
const (
	CodecBlock  = 64   // values with one scale
	CodecGroup  = 4096 // entries of a group; values with one table of CodecI2
	IndexBlock  = 1024 // entries of a block of indices
	codecHeader = 8
)

// codecs says what the format of an array is, by Codec.
var codecs = [codecEnd]struct {
	name       string
	bits       int // of a code; 0 where values do not travel
	perScale   int // values with one scale
	scaleBytes int // 0 without scales
}{
	CodecNone:      {name: "none"},
	CodecPositions: {name: "positions"},
	CodecF32:       {"f32", 32, 1, 0},
	CodecBF16:      {"bf16", 16, 1, 0},
	CodecF16:       {"f16", 16, 1, 0},
	CodecFP8:       {"fp8", 8, CodecBlock, 2},
	CodecI8:        {"i8", 8, CodecBlock, 2},
	CodecI4:        {"i4", 4, CodecBlock, 2},
	CodecI2:        {"i2", 2, CodecGroup, 16},
	CodecSign:      {"1bit", 1, CodecBlock, 2},
}

// String returns the codec's name: "none", "positions", "f32", "bf16", "f16", "fp8", "i8", "i4", "i2"
// or "1bit".
func (c Codec) String() string {
	if c < codecEnd {
		return codecs[c].name
	}
	return fmt.Sprintf("Codec(%d)", uint8(c))
}

// Encodes reports whether c codes lists.
func (c Codec) Encodes() bool { return CodecNone < c && c < codecEnd }

// Quantizes reports whether c codes arrays.
func (c Codec) Quantizes() bool { return CodecPositions < c && c < codecEnd }

// Bits returns the number of bits of a value's code.
func (c Codec) Bits() int { return codecs[c].bits }

func up4(n int) int { return (n + 3) &^ 3 }

func ceilDiv(n, by int) int { return (n + by - 1) / by }

// ScaleBytes returns the length of the scales of an array of n values, at whose end the codes begin.
func (c Codec) ScaleBytes(n int) int {
	if !c.Quantizes() {
		return 0
	}
	return up4(ceilDiv(n, codecs[c].perScale) * codecs[c].scaleBytes)
}

// Size returns the length in bytes of an array of n values.
func (c Codec) Size(n int) int {
	return c.ScaleBytes(n) + up4(ceilDiv(n*c.Bits(), 8))
}

// Layout returns where the parts of a message with m entries begin, in bytes: the headers of the
// blocks, the values, and the blocks.
func (c Codec) Layout(m int) (headers, values, blocks int) {
	headers = codecHeader + 8*ceilDiv(m, CodecGroup)
	values = headers + up4(2*ceilDiv(m, IndexBlock))
	return headers, values, values + c.Size(m)
}

// Bound returns the largest length in bytes of a message of m entries with indices in a range of n, as
// a multiple of 4. Uniformly distributed indices, of a density of 0.1 % to 10 %, take at most 8 % less
// than it allows them.
func (c Codec) Bound(m, n int) int {
	_, _, blocks := c.Layout(m)
	if m == 0 {
		return blocks
	}
	// A block with c gaps of mean s takes at most c*(j+1+s/2^j) bits, j the whole part of log2(s): a
	// concave function of s, so blocks whose gaps have the same mean take most.
	gaps := max(n-m, 0)
	j := max(bits.Len(uint(gaps/m))-1, 0)
	gapBits := m*(j+1) + ceilDiv(gaps, 1<<j)
	filling := ceilDiv(m, IndexBlock) + 1
	return up4(blocks + ceilDiv(gapBits, 8) + filling)
}

// Fit returns how many entries with indices in a range of n surely fit into that many bytes.
func (c Codec) Fit(bytes, n int) int {
	excess := sort.Search(n+1, func(m int) bool { return c.Bound(m, n) > bytes })
	return max(excess-1, 0)
}

// RiceParameter returns the k that an encoder tries first, for count gaps of that sum: the whole part of
// the base-2 logarithm of their mean, at least 0.
//
// The encoder then lowers k as long as that makes the block shorter, in bits without filling. If the
// first step down does not, it raises k in the same way, to 30 at most. A block of a given k is capped if
// its largest quotient is 32 or more and capping makes it shorter; a k that needs more than 1023 bytes of
// quotients is not taken. The result is replaced by gaps of fixed length, as long as the largest, if these
// are not longer in bytes.
func RiceParameter(count int, sum uint64) int {
	return max(bits.Len64(sum/uint64(count))-1, 0)
}

// ChunkedLen returns how many entries [Kernels.TopKChunks] selects of n elements.
func ChunkedLen(n, k, chunk int) int {
	full := n / chunk * min(k, chunk)
	short := min(k, n%chunk)
	return full + short
}

// Message is an encoded list in device memory.
type Message struct {
	Ptr   uintptr // aligned to 4 bytes
	Bytes int     // the capacity, at most 2^31-1
	// Len, if not 0, is the device address of an I32 to which Encode stores the length in bytes,
	// which the message holds too. Decode does not look at it.
	Len uintptr
}

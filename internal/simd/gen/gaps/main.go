// Command gaps writes the kernels that encode and decode the gaps between indices, with AVX2 and BMI2.
package main

import (
	"slices"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"

	. "github.com/tutti-go/tutti/internal/simd/gen/avx"
)

func main() {
	scan()
	sums()
	putLow()
	putHigh()
	decode()
	Generate()
}

func scan() {
	Kernel("scanAVX2", "func(gaps *uint32, idx *int32, rounds int, sums *[8]uint64) (or uint32)",
		"scanAVX2 stores the gaps before idx[1] and those that follow, eight a round, and their sums.")
	gaps := Load(Param("gaps"), GP64())
	idx := Load(Param("idx"), GP64())
	rounds := Load(Param("rounds"), GP64())
	ones := YMM()
	mask := YMM()
	low := YMM()
	VPCMPEQD(ones, ones, ones)
	VPSRLD(Imm(1), ones, mask)
	VPSRLQ(Imm(32), ones, low)
	all := Zero()
	even := Zero()
	odd := Zero()
	Repeat(rounds, func() {
		gap := YMM()
		half := YMM()
		VMOVDQU(Mem{Base: idx, Disp: 4}, gap)
		VPSUBD(Mem{Base: idx}, gap, gap)
		VPADDD(ones, gap, gap)
		VPAND(mask, gap, gap)
		VMOVDQU(gap, Mem{Base: gaps})
		VPOR(gap, all, all)
		VPSRLQ(Imm(32), gap, half)
		VPAND(low, gap, gap)
		VPADDQ(half, odd, odd)
		VPADDQ(gap, even, even)
		ADDQ(Imm(32), gaps)
		ADDQ(Imm(32), idx)
	})
	to := Load(Param("sums"), GP64())
	VMOVDQU(even, Mem{Base: to})
	VMOVDQU(odd, Mem{Base: to, Disp: 32})
	r := GP32()
	VMOVD(Fold(all, func(ops ...Op) { VPOR(ops[0], ops[1], ops[2]) }), r)
	VZEROUPPER()
	Store(r, ReturnIndex(0))
	RET()
}

func sums() {
	Kernel("sumsAVX2", "func(gaps *uint32, rounds int, k uint, sums *[24]uint32)",
		"sumsAVX2 sums gaps>>k, gaps>>(k+1) and gaps>>(k+2), eight of each a round, in eight parts each.")
	gaps := Load(Param("gaps"), GP64())
	rounds := Load(Param("rounds"), GP64())
	k := Load(Param("k"), GP64())
	count := XMM()
	VMOVQ(k, count)
	s := []VecVirtual{Zero(), Zero(), Zero()}
	Repeat(rounds, func() {
		q := YMM()
		VMOVDQU(Mem{Base: gaps}, q)
		VPSRLD(count, q, q)
		for i, sum := range s {
			if i > 0 {
				VPSRLD(Imm(1), q, q)
			}
			VPADDD(q, sum, sum)
		}
		ADDQ(Imm(32), gaps)
	})
	to := Load(Param("sums"), GP64())
	for i, sum := range s {
		VMOVDQU(sum, Mem{Base: to, Disp: 32 * i})
	}
	VZEROUPPER()
	RET()
}

// flush writes acc, in which n bits are set, and keeps the bits that do not fill a byte.
func flush(dst, acc, n Register) {
	MOVQ(acc, Mem{Base: dst})
	bytes := GP64()
	bits := GP64()
	MOVQ(n, bytes)
	SHRQ(Imm(3), bytes)
	ADDQ(bytes, dst)
	MOVQ(n, bits)
	ANDQ(I8(-8), bits)
	SHRXQ(bits, acc, acc)
	ANDQ(Imm(7), n)
}

func putLow() {
	Kernel("lowBMI2", "func(dst *byte, gaps *uint32, pairs int, k uint)",
		"lowBMI2 writes the k lowest bits of pairs of gaps, at most 28, and up to 8 bytes more.")
	dst := Load(Param("dst"), GP64())
	gaps := Load(Param("gaps"), GP64())
	pairs := Load(Param("pairs"), GP64())
	k := Load(Param("k"), GP64())
	mask := GP64()
	acc := GP64()
	n := GP64()
	MOVQ(I32(-1), mask)
	BZHIQ(k, mask, mask)
	MOVQ(mask, acc)
	SHLQ(Imm(32), acc)
	ORQ(acc, mask)
	XORQ(acc, acc)
	XORQ(n, n)
	ADDQ(k, k)
	Repeat(pairs, func() {
		v := GP64()
		MOVQ(Mem{Base: gaps}, v)
		PEXTQ(mask, v, v)
		SHLXQ(n, v, v)
		ORQ(v, acc)
		ADDQ(k, n)
		flush(dst, acc, n)
		ADDQ(Imm(8), gaps)
	})
	MOVQ(acc, Mem{Base: dst})
	RET()
}

func putHigh() {
	Kernel("highBMI2", "func(dst *byte, gaps *uint32, pairs int, k uint)",
		"highBMI2 writes the quotients of pairs of gaps, at most 27 each, and up to 8 bytes more.")
	dst := Load(Param("dst"), GP64())
	gaps := Load(Param("gaps"), GP64())
	pairs := Load(Param("pairs"), GP64())
	k := Load(Param("k"), GP64())
	acc := GP64()
	n := GP64()
	XORQ(acc, acc)
	XORQ(n, n)
	Repeat(pairs, func() {
		for i := range 2 {
			q := GP32()
			MOVL(Mem{Base: gaps, Disp: 4 * i}, q)
			SHRXL(k.(GPVirtual).As32(), q, q)
			ADDQ(q.As64(), n)
			BTSQ(n, acc)
			INCQ(n)
		}
		flush(dst, acc, n)
		ADDQ(Imm(8), gaps)
	})
	MOVQ(acc, Mem{Base: dst})
	RET()
}

// decode lists the positions of ones and then makes indices of eight entries at a time, whose low bits are k bytes.
func decode() {
	Kernel("decodeAVX2", "func(idx []int32, low, high []byte, k uint, next int32) (enough bool)",
		"decodeAVX2 decodes a block without capped quotients, of at least one entry with at most 25 low bits, if",
		"there are enough ones in high. Up to 32 bytes behind low and 8 behind high are read.")
	idx := Load(Param("idx").Base(), GP64())
	left := Load(Param("idx").Len(), GP64())
	high := Load(Param("high").Base(), GP64())
	end := Load(Param("high").Len(), GP64())
	ADDQ(high, end)
	cursor := GP64()
	from := GP64()
	MOVQ(idx, cursor)
	XORQ(from, from)
	Label("word")
	CMPQ(high, end)
	JAE(LabelRef("end"))
	word := GP64()
	MOVQ(Mem{Base: high}, word)
	ADDQ(Imm(8), high)
	TESTQ(word, word)
	JE(LabelRef("next"))
	Label("one")
	one := GP64()
	TZCNTQ(word, one)
	BLSRQ(word, word)
	ADDQ(from, one)
	MOVL(one.As32(), Mem{Base: cursor})
	ADDQ(Imm(4), cursor)
	DECQ(left)
	JE(LabelRef("found"))
	TESTQ(word, word)
	JNE(LabelRef("one"))
	Label("next")
	ADDQ(Imm(64), from)
	JMP(LabelRef("word"))

	Label("found")
	Load(Param("idx").Len(), left)
	low := Load(Param("low").Base(), GP64())
	k := Load(Param("k"), GP64())
	half := GP64()   // the bytes of four entries
	lowest := GP32() // bits beyond these bytes
	MOVQ(k, half)
	SHRQ(Imm(1), half)
	MOVL(I32(-1), lowest)
	BZHIL(k.(GPVirtual).As32(), lowest, lowest)
	mask := Broadcast(lowest)
	count := XMM()
	shuffle := YMM()
	shift := YMM()
	i := YMM()
	sum := Broadcast(Load(Param("next"), GP32()))
	VMOVQ(k, count)
	// The bits at which entries begin in the halves of a register. The upper half starts half a byte later if k is
	// odd.
	VPMULLD(Table("places", 0, 1, 2, 3, 0, 1, 2, 3), Broadcast(k.(GPVirtual).As32()), shift)
	odd := GP32()
	MOVL(k.(GPVirtual).As32(), odd)
	ANDL(Imm(1), odd)
	SHLL(Imm(2), odd)
	upper := YMM()
	VPAND(Table("upper", 0, 0, 0, 0, 7, 7, 7, 7), Broadcast(odd), upper)
	VPADDD(upper, shift, shift)
	VPSRLD(Imm(3), shift, shuffle)
	VPMULLD(Table("bytes", repeated(0x01010101)...), shuffle, shuffle)
	VPADDD(Table("four", repeated(0x03020100)...), shuffle, shuffle)
	VPAND(Table("seven", repeated(7)...), shift, shift)
	VMOVDQU(Table("iota", 0, 1, 2, 3, 4, 5, 6, 7), i)
	eights := Table("eights", repeated(8)...)
	last := Lanes(7)
	// eight converts the positions of eight ones to indices.
	eight := func(q VecVirtual) {
		v := YMM()
		t := YMM()
		VMOVDQU(Mem{Base: low}, v.AsX())
		VINSERTI128(Imm(1), Mem{Base: low, Index: half, Scale: 1}, v, v)
		VPSHUFB(shuffle, v, v)
		VPSRLVD(shift, v, v)
		VPAND(mask, v, v)
		for _, bytes := range []uint64{4, 8} { // the sums of the lanes before
			VPSLLDQ(Imm(bytes), v, t)
			VPADDD(t, v, v)
		}
		VPSHUFD(U8(0xff), v, t)
		VPERM2I128(Imm(0x08), t, t, t)
		VPADDD(t, v, v)
		VPADDD(sum, v, v)
		VPERMD(v, last, sum)
		VPSUBD(i, q, q)
		VPSLLD(count, q, q)
		VPADDD(v, q, q)
		VPADDD(i, q, q)
	}
	q := YMM()
	SUBQ(Imm(8), left)
	JL(LabelRef("rest"))
	Label("eight")
	VMOVDQU(Mem{Base: idx}, q)
	eight(q)
	VMOVDQU(q, Mem{Base: idx})
	VPADDD(eights, i, i)
	ADDQ(k, low)
	ADDQ(Imm(32), idx)
	SUBQ(Imm(8), left)
	JGE(LabelRef("eight"))
	Label("rest")
	ADDQ(Imm(8), left)
	JE(LabelRef("done"))
	valid := YMM()
	VPCMPGTD(Table("iota", 0, 1, 2, 3, 4, 5, 6, 7), Broadcast(left.(GPVirtual).As32()), valid)
	VPMASKMOVD(Mem{Base: idx}, valid, q)
	eight(q)
	VPMASKMOVD(q, valid, Mem{Base: idx})
	Label("done")
	VZEROUPPER()
	XORQ(left, left)
	Label("end")
	enough := GP8()
	TESTQ(left, left)
	SETEQ(enough)
	Store(enough, ReturnIndex(0))
	RET()
}

// repeated returns eight copies of a word.
func repeated(word uint32) []uint32 { return slices.Repeat([]uint32{word}, 8) }

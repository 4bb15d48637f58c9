// Command gaps writes the kernels that code the gaps between indices, with AVX2 and BMI2.
package main

import (
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

// repeat writes a loop of as many rounds as left says, at least one.
func repeat(left Register, body func()) {
	Label("loop")
	body()
	DECQ(left)
	JNZ(LabelRef("loop"))
}

func scan() {
	Kernel("scanAVX2", "func(gaps *uint32, idx *int32, rounds int, sums *[8]uint64) (or uint32)",
		"scanAVX2 stores the gaps before idx[1] and those that follow, eight a round, and their sums.")
	gaps, idx, rounds := Load(Param("gaps"), GP64()), Load(Param("idx"), GP64()), Load(Param("rounds"), GP64())
	ones, mask, low := YMM(), YMM(), YMM()
	VPCMPEQD(ones, ones, ones)
	VPSRLD(Imm(1), ones, mask)
	VPSRLQ(Imm(32), ones, low)
	all, even, odd := Zero(), Zero(), Zero()
	repeat(rounds, func() {
		gap, half := YMM(), YMM()
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
	gaps, rounds, k := Load(Param("gaps"), GP64()), Load(Param("rounds"), GP64()), Load(Param("k"), GP64())
	count := XMM()
	VMOVQ(k, count)
	s := []VecVirtual{Zero(), Zero(), Zero()}
	repeat(rounds, func() {
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

// flush writes acc, in which n bits are set, and keeps those that fill no byte.
func flush(dst, acc, n Register) {
	MOVQ(acc, Mem{Base: dst})
	bytes, bits := GP64(), GP64()
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
	dst, gaps, pairs := Load(Param("dst"), GP64()), Load(Param("gaps"), GP64()), Load(Param("pairs"), GP64())
	k, mask, acc, n := Load(Param("k"), GP64()), GP64(), GP64(), GP64()
	MOVQ(I32(-1), mask)
	BZHIQ(k, mask, mask)
	MOVQ(mask, acc)
	SHLQ(Imm(32), acc)
	ORQ(acc, mask)
	XORQ(acc, acc)
	XORQ(n, n)
	ADDQ(k, k)
	repeat(pairs, func() {
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
	dst, gaps, pairs := Load(Param("dst"), GP64()), Load(Param("gaps"), GP64()), Load(Param("pairs"), GP64())
	k, acc, n := Load(Param("k"), GP64()), GP64(), GP64()
	XORQ(acc, acc)
	XORQ(n, n)
	repeat(pairs, func() {
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

func decode() {
	Kernel("decodeBMI2", "func(idx []int32, low, high []byte, k uint, next int32) (done int)",
		"decodeBMI2 decodes a block without capped quotients, until there are no more ones in high. 8 bytes",
		"behind low and high are read.")
	idx, left := Load(Param("idx").Base(), GP64()), Load(Param("idx").Len(), GP64())
	low, high := Load(Param("low").Base(), GP64()), Load(Param("high").Base(), GP64())
	end := Load(Param("high").Len(), GP64())
	ADDQ(high, end)
	k, sum := Load(Param("k"), GP64()), Load(Param("next"), GP32())
	at, word, place, mask := GP64(), GP64(), GP64(), GP32()
	XORQ(at, at)
	MOVL(I32(-1), mask)
	BZHIL(k.(GPVirtual).As32(), mask, mask)
	MOVQ(Mem{Base: high}, word)
	XORQ(place, place) // of the word's lowest bit, less the entries so far
	Label("entry")
	TESTQ(left, left)
	JE(LabelRef("end"))
	TESTQ(word, word)
	JNE(LabelRef("one"))
	Label("more")
	ADDQ(Imm(8), high)
	ADDQ(Imm(64), place)
	CMPQ(high, end)
	JAE(LabelRef("end"))
	MOVQ(Mem{Base: high}, word)
	TESTQ(word, word)
	JE(LabelRef("more"))
	Label("one")
	q, from, shift, v := GP64(), GP64(), GP64(), GP64()
	TZCNTQ(word, q)
	BLSRQ(word, word)
	ADDQ(place, q)
	SHLXL(k.(GPVirtual).As32(), q.As32(), q.As32())
	MOVQ(at, from)
	SHRQ(Imm(3), from)
	MOVQ(Mem{Base: low, Index: from, Scale: 1}, v)
	MOVQ(at, shift)
	ANDQ(Imm(7), shift)
	SHRXQ(shift, v, v)
	ANDL(mask, v.As32())
	ADDL(v.As32(), sum)
	ADDL(sum, q.As32())
	MOVL(q.As32(), Mem{Base: idx})
	INCL(sum)
	ADDQ(k, at)
	DECQ(place)
	ADDQ(Imm(4), idx)
	DECQ(left)
	JMP(LabelRef("entry"))
	Label("end")
	done := GP64()
	Load(Param("idx").Len(), done)
	SUBQ(left, done)
	Store(done, ReturnIndex(0))
	RET()
}

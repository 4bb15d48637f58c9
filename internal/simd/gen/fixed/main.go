// Command fixed writes the AVX2 kernels of fixed-point sums of float32 in blocks of 64 with one exponent.
//
// Each kernel handles whole blocks from the start of its slices until a block holds something unusual, and returns
// the number of blocks it has handled. The calling Go code handles the remainder.
package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"

	. "github.com/tutti-go/tutti/internal/simd/gen/avx"
)

func main() {
	raiseExponents()
	storeFixed()
	loadFixed()
	loadFixedPower()
	exponents()
	sumFixed()
	meanOfPower()
	meanOfAny()
	heights()
	squares()
	Generate()
}

const (
	block   = 64
	vectors = 8 // registers of a block
	// aheadBytes is how far ahead of the current block terms are prefetched. Nothing else reads ahead while blocks
	// with known exponents are summed, and processors do not prefetch across pages.
	aheadBytes = 4096
)

// sign is the bit in which a stored exponent, an I8, differs from a float's exponent field.
const sign = 1 << 7

// raiseExponents raises the exponent of each block to the exponent of its largest value.
func raiseExponents() {
	Kernel("raiseExponentsAVX2", "func(exponents *byte, src []float32) (done int)",
		"raiseExponentsAVX2 raises the exponents of blocks to those of values.")
	exponents := Load(Param("exponents"), GP64())
	magnitude := Lanes(1<<31 - 1)
	Blocks("src", func(src Register) {
		largest := YMM()
		v := YMM()
		VPAND(Mem{Base: src}, magnitude, largest)
		for i := 1; i < vectors; i++ {
			VPAND(Mem{Base: src, Disp: 32 * i}, magnitude, v)
			VPMAXSD(v, largest, largest)
		}
		exponent := GP32()
		known := GP32()
		VMOVD(Fold(largest, VPMAXSD), exponent)
		SHRL(Imm(23), exponent)
		MOVBLZX(Mem{Base: exponents}, known)
		XORL(U32(sign), known)
		CMPL(exponent, known)
		CMOVLLT(known, exponent)
		XORL(U32(sign), exponent)
		MOVB(exponent.As8(), Mem{Base: exponents})
	}, Step{exponents, 1})
}

// storeFixed multiplies by a power of two in two steps, because a single one may be out of range.
func storeFixed() {
	Kernel("storeFixedAVX2", "func(sums []int32, exponents *byte, src *float32, bits int, add bool) (done int)",
		"storeFixedAVX2 stores values of blocks as integers, or adds them.")
	exponents := Load(Param("exponents"), GP64())
	src := Load(Param("src"), GP64())
	bits := Load(Param("bits"), GP64())
	add := GP32()
	MOVBLZX(Address(Param("add")), add)
	Blocks("sums", func(sums Register) {
		power := GP64()
		half := GP64()
		MOVBQZX(Mem{Base: exponents}, power)
		XORQ(U32(sign), power)
		SUBQ(bits, power)
		NEGQ(power)
		ADDQ(Imm(126), power) // of two
		MOVQ(power, half)
		SARQ(Imm(1), half)
		SUBQ(half, power)
		first := powerOfTwo(half.As32())
		second := powerOfTwo(power.As32())
		var q [vectors]VecVirtual
		for i := range q {
			q[i] = YMM()
			VMULPS(Mem{Base: src, Disp: 32 * i}, first, q[i])
			VMULPS(second, q[i], q[i])
			VCVTPS2DQ(q[i], q[i])
		}
		TESTL(add, add)
		JE(LabelRef("store"))
		for i, v := range q {
			VPADDD(Mem{Base: sums, Disp: 32 * i}, v, v)
		}
		Label("store")
		for i, v := range q {
			VMOVDQU(v, Mem{Base: sums, Disp: 32 * i})
		}
	}, Step{src, 4 * block}, Step{exponents, 1})
}

// powerOfTwo returns a vector of 2^exponent as float32.
func powerOfTwo(exponent Register) VecVirtual {
	ADDL(Imm(127), exponent)
	SHLL(Imm(23), exponent)
	return Broadcast(exponent)
}

func loadFixed() {
	Kernel("loadFixedAVX2",
		"func(dst []float32, sums *int32, exponents *byte, multiple float64, limit float32, bits int) (done int)",
		"loadFixedAVX2 stores multiples of the sums of blocks, as far as the limit, until a block is not finite.")
	exponents := Load(Param("exponents"), GP64())
	sums := Load(Param("sums"), GP64())
	bits := Load(Param("bits"), GP64())
	multiple := Load(Param("multiple"), XMM())
	limit := YMM()
	lowest := YMM()
	limitAddress, _ := Param("limit").Resolve()
	VBROADCASTSS(limitAddress.Addr, limit)
	VXORPS(lowest, lowest, lowest)
	VSUBPS(limit, lowest, lowest)
	Blocks("dst", func(dst Register) {
		power := GP64()
		MOVBQZX(Mem{Base: exponents}, power)
		XORQ(U32(sign), power)
		CMPQ(power, U32(255))
		JE(LabelRef("end"))
		SUBQ(bits, power)
		ADDQ(U32(1023-126), power)
		SHLQ(Imm(52), power)
		unit := XMM()
		scale := YMM()
		VMOVQ(power, unit)
		VMULSD(multiple, unit, unit)
		VBROADCASTSD(unit, scale)
		for i := range vectors {
			v := loadScaled(sums, 32*i, scale)
			VINSERTF128(Imm(1), loadScaled(sums, 32*i+16, scale).AsX(), v, v)
			VMINPS(v, limit, v) // in this order a NaN stays
			VMAXPS(v, lowest, v)
			VMOVUPS(v, Mem{Base: dst, Disp: 32 * i})
		}
	}, Step{sums, 4 * block}, Step{exponents, 1})
}

// loadScaled returns four sums times a scale, rounded to float32.
func loadScaled(sums Register, offset int, scale VecVirtual) VecVirtual {
	wide := YMM()
	narrow := YMM()
	VCVTDQ2PD(Mem{Base: sums, Disp: offset}, wide)
	VMULPD(scale, wide, wide)
	VCVTPD2PSY(wide, narrow.AsX())
	return narrow
}

// loadFixedPower rounds once, because the product with a power of two is exact.
func loadFixedPower() {
	Kernel("loadFixedPowerAVX2",
		"func(dst []float32, sums *int32, exponents *byte, offset, lowest, highest int) (done int)",
		"loadFixedPowerAVX2 stores the sums of blocks times powers of two, whose exponents as float32 are those of the",
		"blocks and an offset, until the exponent of a block is out of range.")
	exponents := Load(Param("exponents"), GP64())
	sums := Load(Param("sums"), GP64())
	offset := Load(Param("offset"), GP64())
	lowest := Load(Param("lowest"), GP64())
	highest := Load(Param("highest"), GP64())
	Blocks("dst", func(dst Register) {
		power := GP64()
		MOVBQZX(Mem{Base: exponents}, power)
		XORQ(U32(sign), power)
		CMPQ(power, lowest)
		JLT(LabelRef("end"))
		CMPQ(power, highest)
		JGT(LabelRef("end"))
		ADDQ(offset, power)
		SHLQ(Imm(23), power)
		scale := Broadcast(power.As32())
		for i := range vectors {
			v := YMM()
			VCVTDQ2PS(Mem{Base: sums, Disp: 32 * i}, v)
			VMULPS(scale, v, v)
			VMOVUPS(v, Mem{Base: dst, Disp: 32 * i})
		}
	}, Step{sums, 4 * block}, Step{exponents, 1})
}

// rounds writes the end of a kernel that handles a block for each exponent. body gets the exponent's address and may
// jump to the end or to the next block. offset is the block's offset in the arrays. rounds returns the number of
// blocks.
func rounds(offset Register, body func(exponent Mem)) {
	exponents := Load(Param("exponents").Base(), GP64())
	count := Load(Param("exponents").Len(), GP64())
	done := GP64()
	XORQ(done, done)
	Label("block")
	CMPQ(done, count)
	JGE(LabelRef("end"))
	body(Mem{Base: exponents, Index: done, Scale: 1})
	Label("next")
	ADDQ(U32(4*block), offset)
	INCQ(done)
	JMP(LabelRef("block"))
	Label("end")
	VZEROUPPER()
	Store(done, ReturnIndex(0))
	RET()
}

// loop writes a loop with a name over a list of at least one array. body gets the block at an offset.
func loop(name, list string, offset Register, body func(j int, x Mem)) {
	arrays := Load(Param(list).Base(), GP64())
	count := Load(Param(list).Len(), GP64())
	i := GP64()
	array := GP64()
	XORQ(i, i)
	Label(name)
	MOVQ(Mem{Base: arrays, Index: i, Scale: 8}, array)
	for j := range vectors {
		body(j, Mem{Base: array, Index: offset, Scale: 1, Disp: 32 * j})
	}
	INCQ(i)
	CMPQ(i, count)
	JLT(LabelRef(name))
}

// skipZeros handles a block whose exponent is below the lowest. Such a block has only zeros if its parameters were
// not used: store stores the results, and the kernel continues with the next block. A block with other terms jumps to
// the end.
func skipZeros(field Register, lowest Op, offset Register, store func(zero VecVirtual)) {
	CMPQ(field, lowest)
	JGE(LabelRef("ordinary"))
	all := Zero()
	loop("zero", "terms", offset, func(_ int, x Mem) { VPOR(x, all, all) })
	VPSLLD(Imm(1), all, all) // ignore the sign
	VPTEST(all, all)
	JNE(LabelRef("end"))
	store(all)
	JMP(LabelRef("next"))
	Label("ordinary")
}

// exponents runs first, over several blocks: the exponent of a block is known long after its values were read.
func exponents() {
	Kernel("exponentsAVX2", "func(exponents []byte, terms []uintptr, offset int) (done int)",
		"exponentsAVX2 stores the exponents of the blocks of all terms, arrays of float32 from an offset in bytes on.")
	offset := Load(Param("offset"), GP64())
	magnitude := Lanes(1<<31 - 1)
	rounds(offset, func(exponent Mem) {
		largest := [2]VecVirtual{Zero(), Zero()}
		loop("term", "terms", offset, func(j int, x Mem) {
			v := YMM()
			VPAND(x, magnitude, v)
			VPMAXSD(v, largest[j%2], largest[j%2])
		})
		VPMAXSD(largest[1], largest[0], largest[0])
		field := GP32()
		VMOVD(Fold(largest[0], VPMAXSD), field)
		SHRL(Imm(23), field)
		XORL(U32(sign), field)
		MOVB(field.As8(), exponent)
	})
}

// sumTerms returns the sums of a block. The exponent is large enough that a single product makes integers of the
// terms.
func sumTerms(exponent, offset, bits Register) (sums [vectors]VecVirtual) {
	power := GP64()
	MOVQ(bits, power)
	SUBQ(exponent, power)
	ADDQ(Imm(126), power)
	scale := powerOfTwo(power.As32())
	for j := range sums {
		sums[j] = Zero()
	}
	loop("term", "terms", offset, func(j int, x Mem) {
		if j%2 == 0 { // one per cache line
			fetched := x
			fetched.Disp += aheadBytes
			PREFETCHT0(fetched)
		}
		v := YMM()
		VMULPS(x, scale, v)
		VCVTPS2DQ(v, v)
		VPADDD(v, sums[j], sums[j])
	})
	return sums
}

// loadField returns the exponent field of a block.
func loadField(exponent Mem) GPVirtual {
	field := GP64()
	MOVBQZX(exponent, field)
	XORQ(U32(sign), field)
	return field
}

func sumFixed() {
	Kernel("sumFixedAVX2",
		"func(sums *int32, exponents []byte, terms []uintptr, offset, bits, lowest int) (done int)",
		"sumFixedAVX2 stores the sums of all terms, until the exponent of a block is below the lowest.")
	sums := Load(Param("sums"), GP64())
	offset := Load(Param("offset"), GP64())
	bits := Load(Param("bits"), GP64())
	lowest := Load(Param("lowest"), GP64())
	rounds(offset, func(exponent Mem) {
		field := loadField(exponent)
		skipZeros(field, lowest, offset, func(zero VecVirtual) {
			for j := range vectors {
				VMOVDQU(zero, Mem{Base: sums, Disp: 32 * j})
			}
			ADDQ(U32(4*block), sums)
		})
		for j, v := range sumTerms(field, offset, bits) {
			VMOVDQU(v, Mem{Base: sums, Disp: 32 * j})
		}
		ADDQ(U32(4*block), sums)
	})
}

// meanFixed makes values from sums, as loadFixedPower does or, for other multiples, as loadFixed does.
func meanFixed(name string, scaled func(v, scale VecVirtual), scale func(field, multiple Register) VecVirtual) {
	Kernel(name,
		"func(means []uintptr, exponents []byte, terms []uintptr, offset, bits int, limits *[3]int) (done int)",
		name+" stores multiples of the sums of all terms as all means, until the exponent of a block is out of range.",
		"limits has the multiple, and the lowest and the highest exponent.")
	offset := Load(Param("offset"), GP64())
	bits := Load(Param("bits"), GP64())
	limits := Load(Param("limits"), GP64())
	rounds(offset, func(exponent Mem) {
		field := loadField(exponent)
		skipZeros(field, Mem{Base: limits, Disp: 8}, offset, func(zero VecVirtual) {
			loop("clear", "means", offset, func(_ int, x Mem) { VMOVUPS(zero, x) })
		})
		CMPQ(field, Mem{Base: limits, Disp: 16})
		JGT(LabelRef("end"))
		sums := sumTerms(field, offset, bits)
		multiple := GP64()
		MOVQ(Mem{Base: limits}, multiple)
		unit := scale(field, multiple)
		for _, v := range sums {
			scaled(v, unit)
		}
		loop("mean", "means", offset, func(j int, x Mem) { VMOVUPS(sums[j], x) })
	})
}

// meanOfPower rounds once, because the product with a power of two is exact.
func meanOfPower() {
	meanFixed("meanPowerAVX2", func(v, scale VecVirtual) {
		VCVTDQ2PS(v, v)
		VMULPS(scale, v, v)
	}, func(field, shift Register) VecVirtual {
		ADDQ(shift, field)
		SHLQ(Imm(23), field)
		return Broadcast(field.(GPVirtual).As32())
	})
}

func meanOfAny() {
	meanFixed("meanAnyAVX2", func(v, scale VecVirtual) {
		high := XMM()
		VEXTRACTI128(Imm(1), v, high)
		wide := [2]VecVirtual{YMM(), YMM()}
		VCVTDQ2PD(v.AsX(), wide[0])
		VCVTDQ2PD(high, wide[1])
		for _, w := range wide {
			VMULPD(scale, w, w)
			VCVTPD2PSY(w, w.AsX())
		}
		VINSERTF128(Imm(1), wide[1].AsX(), wide[0], v)
	}, func(field, multiple Register) VecVirtual {
		bits := Load(Param("bits"), GP64())
		SUBQ(bits, field)
		ADDQ(U32(1023-126), field)
		SHLQ(Imm(52), field)
		power := XMM()
		factor := XMM()
		unit := YMM()
		VMOVQ(field, power)
		VMOVQ(multiple, factor)
		VMULSD(factor, power, power)
		VBROADCASTSD(power, unit)
		return unit
	})
}

// heights bounds the squares of sums.
func heights() {
	Kernel("heightsAVX2", "func(sums []int32, exponents *byte, top *int) (done int)",
		"heightsAVX2 raises top to the exponents of blocks that are not zeros and the lengths of their largest sums,",
		"together, until a block is not finite.")
	exponents := Load(Param("exponents"), GP64())
	address := Load(Param("top"), GP64())
	top := GP64()
	MOVQ(Mem{Base: address}, top)
	Blocks("sums", func(sums Register) {
		field := loadField(Mem{Base: exponents})
		CMPQ(field, U32(255))
		JE(LabelRef("end"))
		all := YMM()
		VPABSD(Mem{Base: sums}, all)
		for i := 1; i < vectors; i++ {
			v := YMM()
			VPABSD(Mem{Base: sums, Disp: 32 * i}, v)
			VPOR(v, all, all)
		}
		magnitudes := GP64()
		VMOVD(Fold(all, func(x ...Op) { VPOR(x[0], x[1], x[2]) }), magnitudes.As32())
		TESTQ(magnitudes, magnitudes)
		JE(LabelRef("zeros"))
		BSRQ(magnitudes, magnitudes)
		LEAQ(Mem{Base: field, Index: magnitudes, Scale: 1, Disp: 1}, field)
		CMPQ(field, top)
		CMOVQGT(field, top)
		MOVQ(top, Mem{Base: address})
		Label("zeros")
	}, Step{exponents, 1})
}

// squares adds as integers, so the order of lanes does not matter. One of the two shifts is by zero.
func squares() {
	Kernel("squaresAVX2", "func(sums []int32, exponents *byte, offset int, words *[2]uint64) (done int)",
		"squaresAVX2 adds the squares of sums, shifted to the left by twice their exponents and an offset, to the words",
		"of a total, which get 32 bits of a block each.")
	exponents := Load(Param("exponents"), GP64())
	offset := Load(Param("offset"), GP64())
	words := Load(Param("words"), GP64())
	zero := GP64()
	XORQ(zero, zero)
	Blocks("sums", func(sums Register) {
		shift := loadField(Mem{Base: exponents})
		ADDQ(shift, shift)
		ADDQ(offset, shift)
		back := GP64()
		MOVQ(shift, back)
		NEGQ(back)
		TESTQ(shift, shift)
		CMOVQLT(zero, shift)
		TESTQ(back, back)
		CMOVQLT(zero, back)
		left := XMM()
		VMOVQ(shift, left)
		right := XMM()
		VMOVQ(back, right)
		totals := [2]VecVirtual{Zero(), Zero()}
		for i := range vectors {
			even := YMM()
			odd := YMM()
			VMOVDQU(Mem{Base: sums, Disp: 32 * i}, even)
			VPSRLQ(Imm(32), even, odd)
			for j, v := range []VecVirtual{even, odd} {
				VPMULDQ(v, v, v)
				VPSLLQ(left, v, v)
				VPSRLQ(right, v, v)
				VPADDQ(v, totals[j], totals[j])
			}
		}
		VPADDQ(totals[1], totals[0], totals[0])
		high := XMM()
		low := totals[0].AsX()
		VEXTRACTI128(Imm(1), totals[0], high)
		VPADDQ(high, low, low)
		VPSHUFD(U8(0b01_00_11_10), low, high)
		VPADDQ(high, low, low)
		total := GP64()
		word := GP64()
		VMOVQ(low, total)
		MOVL(total.As32(), word.As32())
		ADDQ(word, Mem{Base: words})
		SHRQ(Imm(32), total)
		ADDQ(total, Mem{Base: words, Disp: 8})
	}, Step{exponents, 1})
}

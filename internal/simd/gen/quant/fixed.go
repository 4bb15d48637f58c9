package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"

	. "github.com/tutti-go/tutti/internal/simd/gen/avx"
)

// sign is the bit by which an exponent as it is stored, an I8, differs from the field of a float.
const sign = 1 << 7

// raiseExponents keeps the greater of the exponent that a block has and that of its largest value.
func raiseExponents() {
	Kernel("raiseExponentsAVX2", "func(exponents *byte, src []float32) (done int)",
		"raiseExponentsAVX2 raises the exponents of blocks to those of values.")
	exponents := Load(Param("exponents"), GP64())
	magnitude := Lanes(1<<31 - 1)
	blocks("src", func(src Register) {
		largest, v := YMM(), YMM()
		VPAND(Mem{Base: src}, magnitude, largest)
		for i := 1; i < vectors; i++ {
			VPAND(Mem{Base: src, Disp: 32 * i}, magnitude, v)
			VPMAXSD(v, largest, largest)
		}
		exponent, known := GP32(), GP32()
		VMOVD(Fold(largest, VPMAXSD), exponent)
		SHRL(Imm(23), exponent)
		MOVBLZX(Mem{Base: exponents}, known)
		XORL(U32(sign), known)
		CMPL(exponent, known)
		CMOVLLT(known, exponent)
		XORL(U32(sign), exponent)
		MOVB(exponent.As8(), Mem{Base: exponents})
	}, step{exponents, 1})
}

// storeFixed multiplies by a power of two in two steps, as a single one may be out of range.
func storeFixed() {
	Kernel("storeFixedAVX2", "func(sums []int32, exponents *byte, src *float32, bits int, add bool) (done int)",
		"storeFixedAVX2 stores values of blocks as integers, or adds them.")
	exponents, src := Load(Param("exponents"), GP64()), Load(Param("src"), GP64())
	bits := Load(Param("bits"), GP64())
	add := GP32()
	MOVBLZX(Address(Param("add")), add)
	blocks("sums", func(sums Register) {
		power, half := GP64(), GP64()
		MOVBQZX(Mem{Base: exponents}, power)
		XORQ(U32(sign), power)
		SUBQ(bits, power)
		NEGQ(power)
		ADDQ(Imm(126), power) // of two
		MOVQ(power, half)
		SARQ(Imm(1), half)
		SUBQ(half, power)
		first, second := powerOfTwo(half.As32()), powerOfTwo(power.As32())
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
	}, step{src, 4 * block}, step{exponents, 1})
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
	exponents, sums := Load(Param("exponents"), GP64()), Load(Param("sums"), GP64())
	bits, multiple := Load(Param("bits"), GP64()), Load(Param("multiple"), XMM())
	limit, lowest := YMM(), YMM()
	limitAddress, _ := Param("limit").Resolve()
	VBROADCASTSS(limitAddress.Addr, limit)
	VXORPS(lowest, lowest, lowest)
	VSUBPS(limit, lowest, lowest)
	blocks("dst", func(dst Register) {
		power := GP64()
		MOVBQZX(Mem{Base: exponents}, power)
		XORQ(U32(sign), power)
		CMPQ(power, U32(255))
		JE(LabelRef("end"))
		SUBQ(bits, power)
		ADDQ(U32(1023-126), power)
		SHLQ(Imm(52), power)
		unit, scale := XMM(), YMM()
		VMOVQ(power, unit)
		VMULSD(multiple, unit, unit)
		VBROADCASTSD(unit, scale)
		for i := range vectors {
			v := loadScaled(sums, 32*i, scale)
			VINSERTF128(Imm(1), loadScaled(sums, 32*i+16, scale).AsX(), v, v)
			VMINPS(v, limit, v) // in this order NaN stays
			VMAXPS(v, lowest, v)
			VMOVUPS(v, Mem{Base: dst, Disp: 32 * i})
		}
	}, step{sums, 4 * block}, step{exponents, 1})
}

// loadScaled returns four sums, times a scale, rounded to float32.
func loadScaled(sums Register, offset int, scale VecVirtual) VecVirtual {
	wide, narrow := YMM(), YMM()
	VCVTDQ2PD(Mem{Base: sums, Disp: offset}, wide)
	VMULPD(scale, wide, wide)
	VCVTPD2PSY(wide, narrow.AsX())
	return narrow
}

// loadFixedPower rounds once, as the product with a power of two is exact.
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
	blocks("dst", func(dst Register) {
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
	}, step{sums, 4 * block}, step{exponents, 1})
}

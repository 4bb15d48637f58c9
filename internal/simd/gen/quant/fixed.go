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
		"func(dst []float32, sums *int32, exponents *byte, multiple, limit float64, bits int) (done int)",
		"loadFixedAVX2 stores multiples of the sums of blocks, as far as the limit, until a block is not finite.")
	exponents, sums := Load(Param("exponents"), GP64()), Load(Param("sums"), GP64())
	bits, multiple := Load(Param("bits"), GP64()), Load(Param("multiple"), XMM())
	limit, lowest := YMM(), YMM()
	limitAddress, _ := Param("limit").Resolve()
	VBROADCASTSD(limitAddress.Addr, limit)
	VXORPD(lowest, lowest, lowest)
	VSUBPD(limit, lowest, lowest)
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
		for i := range 2 * vectors {
			wide, narrow := YMM(), XMM()
			VCVTDQ2PD(Mem{Base: sums, Disp: 16 * i}, wide)
			VMULPD(scale, wide, wide)
			VMINPD(wide, limit, wide) // in this order NaN stays
			VMAXPD(wide, lowest, wide)
			VCVTPD2PSY(wide, narrow)
			VMOVUPS(narrow, Mem{Base: dst, Disp: 16 * i})
		}
	}, step{sums, 4 * block}, step{exponents, 1})
}

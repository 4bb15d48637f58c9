package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/tutti-go/tutti/internal/simd/gen/avx"
)

// widen loads w bytes of 16-bit values as 32-bit values in 2w bytes, with the instruction by.
func widen(w int, from Mem, by instruction) reg.VecVirtual {
	v := sized(2*w, YMM())
	if w >= 8 {
		by(from, v)
	} else {
		by(loadVector(w, from), v)
	}
	return v
}

// widenF16 loads w bytes of binary16 values as float32 in 2w bytes. widenBF16 does the same for bfloat16 values.
func widenF16(w int, from Mem) reg.VecVirtual { return widen(w, from, VCVTPH2PS) }

func widenBF16(w int, from Mem) reg.VecVirtual {
	v := widen(w, from, VPMOVZXWD)
	VPSLLD(Imm(16), v, v)
	return v
}

// narrowF16 returns the float32 values as binary16, in w bytes.
func narrowF16(w int, v reg.VecVirtual) reg.VecVirtual {
	const nearestEven = 0
	result := XMM()
	VCVTPS2PH(Imm(nearestEven), sized(2*w, v), result)
	return result
}

// bf16Rounding holds the constants for rounding to bfloat16.
type bf16Rounding struct{ one, belowHalf reg.VecVirtual }

func newBF16Rounding() bf16Rounding {
	return bf16Rounding{one: avx.Lanes(1), belowHalf: avx.Lanes(0x7fff)}
}

// add makes the upper halves of float32 values the nearest bfloat16. It adds just under half a unit of the last kept
// bit, and that bit itself so that ties go to even.
func (r bf16Rounding) add(w int, v reg.VecVirtual) {
	bias := sized(w, YMM())
	VPSRLD(Imm(16), v, bias)
	VPAND(sized(w, r.one), bias, bias)
	VPADDD(sized(w, r.belowHalf), v, v)
	VPADDD(bias, v, v)
}

// bf16Narrowing rounds any float32, keeping NaNs.
type bf16Narrowing struct {
	bf16Rounding
	quietBit reg.VecVirtual
}

// narrow returns the float32 values as bfloat16, in w bytes.
func (r bf16Narrowing) narrow(w int, v reg.VecVirtual) reg.VecVirtual {
	const isUnordered = 3
	unordered := sized(2*w, YMM())
	nan := sized(2*w, YMM())
	VCMPPS(Imm(isUnordered), v, v, unordered)
	VPOR(sized(2*w, r.quietBit), v, nan)
	r.add(2*w, v)
	VBLENDVPS(unordered, nan, v, v)
	VPSRLD(Imm(16), v, v)
	result := XMM()
	upper := XMM()
	if 2*w == ymmBytes {
		VEXTRACTI128(Imm(1), v, upper)
		VPACKUSDW(upper, v.AsX(), result)
	} else {
		VPACKUSDW(v.AsX(), v.AsX(), result)
	}
	return result
}

// conversions writes the four conversions between 16-bit floats and float32, and the conversion to FP8E4M3.
func conversions() {
	conversion("f16ToF32AVX2", "widens len(dst) binary16 values.", 2, 4, func() converter {
		return widenF16
	})
	conversion("f32ToF16AVX2", "rounds len(dst) values to binary16.", 4, 2, func() converter {
		return func(w int, from Mem) reg.VecVirtual {
			return narrowF16(w/2, loadVector(w, from))
		}
	})
	conversion("bf16ToF32AVX2", "widens len(dst) bfloat16 values.", 2, 4, func() converter {
		return widenBF16
	})
	conversion("f32ToBF16AVX2", "rounds len(dst) values to bfloat16.", 4, 2, func() converter {
		narrowing := bf16Narrowing{newBF16Rounding(), avx.Lanes(1 << 22)}
		return func(w int, from Mem) reg.VecVirtual {
			return narrowing.narrow(w/2, loadVector(w, from))
		}
	})
	conversion("f32ToE4M3AVX2", "rounds len(dst) values to FP8E4M3.", 4, 1, func() converter {
		return func(w int, from Mem) reg.VecVirtual {
			v := loadVector(w, from)
			fp8Formats[0].round(fp8Width(w/4), v)
			return packBytes(w/4, vector{v})
		}
	})
}

// converter loads w bytes and returns the converted elements.
type converter func(w int, from Mem) reg.VecVirtual

// conversion writes a function that converts elements of from bytes to elements of to bytes, one to one.
func conversion(name, doc string, from, to int, prepare func() converter) {
	const lanes, unroll = ymmBytes / 4, 4
	types := map[int]string{1: "uint8", 2: "uint16", 4: "float32"}
	avx.Kernel(name, fmt.Sprintf("func(dst []%s, src []%s)", types[to], types[from]), name+" "+doc)
	dst := Load(Param("dst").Base(), GP64())
	left := Load(Param("dst").Len(), GP64())
	src := Load(Param("src").Base(), GP64())
	convert := prepare()

	step := func(lanes, unroll int) {
		for i := range unroll {
			v := convert(lanes*from, Mem{Base: src, Disp: i * lanes * from})
			storeVector(lanes*to, v, Mem{Base: dst, Disp: i * lanes * to})
		}
		ADDQ(Imm(uint64(unroll*lanes*from)), src)
		ADDQ(Imm(uint64(unroll*lanes*to)), dst)
	}

	Label("groups")
	SUBQ(Imm(lanes*unroll), left)
	JLT(LabelRef("tail"))
	step(lanes, unroll)
	JMP(LabelRef("groups"))

	// The remainder is negative now, but its lower bits still count the remaining elements.
	Label("tail")
	for n := lanes * unroll / 2; n > 0; n /= 2 {
		next := fmt.Sprintf("below%d", n)
		TESTQ(U32(n), left)
		JZ(LabelRef(next))
		step(min(n, lanes), max(1, n/lanes))
		Label(next)
	}
	VZEROUPPER()
	RET()
}

package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// widenF16 loads w bytes of binary16 values as float32, in 2w bytes.
func widenF16(w int, from Mem) reg.VecVirtual {
	v := sized(2*w, YMM())
	if w >= 8 {
		VCVTPH2PS(from, v)
	} else {
		VCVTPH2PS(loadVector(w, from), v)
	}
	return v
}

// narrowF16 returns the float32 values as binary16, in w bytes.
func narrowF16(w int, v reg.VecVirtual) reg.VecVirtual {
	const nearestEven = 0
	result := XMM()
	VCVTPS2PH(Imm(nearestEven), sized(2*w, v), result)
	return result
}

// widenBF16 loads w bytes of bfloat16 values as float32, in 2w bytes.
func widenBF16(w int, from Mem) reg.VecVirtual {
	v := sized(2*w, YMM())
	if w >= 8 {
		VPMOVZXWD(from, v)
	} else {
		VPMOVZXWD(loadVector(w, from), v)
	}
	VPSLLD(Imm(16), v, v)
	return v
}

// bf16Rounding holds the constants that rounding to bfloat16 takes.
type bf16Rounding struct{ one, belowHalf reg.VecVirtual }

func newBF16Rounding() bf16Rounding {
	return bf16Rounding{one: broadcast32(1), belowHalf: broadcast32(0x7fff)}
}

// add adds to the bits of float32 values what makes their upper halves the
// nearest bfloat16: just under half a unit of the last kept bit, and that bit
// itself so that ties go to even.
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

func newBF16Narrowing() bf16Narrowing {
	return bf16Narrowing{newBF16Rounding(), broadcast32(1 << 22)}
}

// narrow returns the float32 values as bfloat16, in w bytes.
func (r bf16Narrowing) narrow(w int, v reg.VecVirtual) reg.VecVirtual {
	const isUnordered = 3
	unordered, nan := sized(2*w, YMM()), sized(2*w, YMM())
	VCMPPS(Imm(isUnordered), v, v, unordered)
	VPOR(sized(2*w, r.quietBit), v, nan)
	r.add(2*w, v)
	VBLENDVPS(unordered, nan, v, v)
	VPSRLD(Imm(16), v, v)
	result, upper := XMM(), XMM()
	if 2*w == ymmBytes {
		VEXTRACTI128(Imm(1), v, upper)
		VPACKUSDW(upper, v.AsX(), result)
	} else {
		VPACKUSDW(v.AsX(), v.AsX(), result)
	}
	return result
}

// conversions writes the four conversions between 16-bit floats and float32, and that to FP8E4M3.
func conversions() {
	conversion{
		name: "f16ToF32AVX2", doc: "f16ToF32AVX2 widens len(dst) binary16 values.",
		signature: "func(dst []float32, src []uint16)", from: 2, to: 4,
		prepare: func() converter { return widenF16 },
	}.generate()
	conversion{
		name: "f32ToF16AVX2", doc: "f32ToF16AVX2 rounds len(dst) values to binary16.",
		signature: "func(dst []uint16, src []float32)", from: 4, to: 2,
		prepare: func() converter {
			return func(w int, from Mem) reg.VecVirtual { return narrowF16(w/2, loadVector(w, from)) }
		},
	}.generate()
	conversion{
		name: "bf16ToF32AVX2", doc: "bf16ToF32AVX2 widens len(dst) bfloat16 values.",
		signature: "func(dst []float32, src []uint16)", from: 2, to: 4,
		prepare: func() converter { return widenBF16 },
	}.generate()
	conversion{
		name: "f32ToBF16AVX2", doc: "f32ToBF16AVX2 rounds len(dst) values to bfloat16.",
		signature: "func(dst []uint16, src []float32)", from: 4, to: 2,
		prepare: func() converter {
			narrowing := newBF16Narrowing()
			return func(w int, from Mem) reg.VecVirtual {
				return narrowing.narrow(w/2, loadVector(w, from))
			}
		},
	}.generate()
	conversion{
		name: "f32ToE4M3AVX2", doc: "f32ToE4M3AVX2 rounds len(dst) values to FP8E4M3.",
		signature: "func(dst []uint8, src []float32)", from: 4, to: 1,
		prepare: func() converter {
			return func(w int, from Mem) reg.VecVirtual {
				v := loadVector(w, from)
				fp8Formats[0].round(fp8Width(w/4), v)
				return packBytes(w/4, vector{v})
			}
		},
	}.generate()
}

// converter loads w bytes and returns the converted elements.
type converter func(w int, from Mem) reg.VecVirtual

// conversion is a function that converts elements of from bytes to elements of
// to bytes, one to one.
type conversion struct {
	name, doc, signature string
	from, to             int
	prepare              func() converter
}

func (c conversion) generate() {
	const lanes, unroll = ymmBytes / 4, 4
	TEXT(c.name, nosplit, c.signature)
	Doc(c.doc)
	Pragma("noescape")
	dst := Load(Param("dst").Base(), GP64())
	left := Load(Param("dst").Len(), GP64())
	src := Load(Param("src").Base(), GP64())
	convert := c.prepare()

	step := func(lanes, unroll int) {
		for i := range unroll {
			v := convert(lanes*c.from, Mem{Base: src, Disp: i * lanes * c.from})
			storeVector(lanes*c.to, v, Mem{Base: dst, Disp: i * lanes * c.to})
		}
		ADDQ(Imm(uint64(unroll*lanes*c.from)), src)
		ADDQ(Imm(uint64(unroll*lanes*c.to)), dst)
	}

	Label("groups")
	SUBQ(Imm(lanes*unroll), left)
	JLT(LabelRef("tail"))
	step(lanes, unroll)
	JMP(LabelRef("groups"))

	// What is left is negative now, but its lower bits still count elements.
	Label("tail")
	for n := lanes * unroll / 2; n > 0; n /= 2 {
		next := labelf("below%d", n)
		TESTQ(U32(n), left)
		JZ(LabelRef(next))
		step(min(n, lanes), max(1, n/lanes))
		Label(next)
	}
	VZEROUPPER()
	RET()
}

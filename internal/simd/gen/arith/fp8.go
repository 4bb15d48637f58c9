package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/tutti-go/tutti/internal/simd/gen/avx"
)

// fp8Format is one of the OCP 8-bit float formats, which saturate.
type fp8Format struct {
	kind               string
	mantissaBits, bias int
	largest            float32 // largest number
	nan                uint32  // bit pattern
	// toF16 converts patterns in 16-bit lanes to binary16 numbers that are 1/scale of the values.
	toF16 func(v reg.VecVirtual)
	scale float32
}

var fp8Formats = []fp8Format{
	{
		kind: "FP8E4M3", mantissaBits: 3, bias: 7, largest: 448, nan: 0x7f,
		toF16: e4m3ToF16, scale: 256,
	},
	{
		kind: "FP8E5M2", mantissaBits: 2, bias: 15, largest: 57344, nan: 0x7e,
		toF16: func(v reg.VecVirtual) { VPSLLW(Imm(8), v, v) }, scale: 1,
	},
}

// e4m3ToF16 moves exponent and mantissa to their places in binary16. The bias there is larger by 8, so the numbers
// are 1/256 of the values. The only NaN stays a NaN.
func e4m3ToF16(v reg.VecVirtual) {
	sign := XMM()
	nan := XMM()
	VPAND(constant32(0x00800080), v, sign)
	VPSLLW(Imm(8), sign, sign)
	VPAND(constant32(0x007f007f), v, v)
	VPCMPEQW(constant32(0x007f007f), v, nan)
	VPSRLW(Imm(1), nan, nan)
	VPSLLW(Imm(7), v, v)
	VPOR(nan, v, v)
	VPOR(sign, v, v)
}

// reduction returns the kernel of an op. A vector of elements is as wide as a register and fills up to four registers
// as float32.
func (f fp8Format) reduction(op string) kernel {
	k := newKernel(op, 1, ymmBytes, f.kind)
	k.unroll = 1
	k.steps = func(count reg.GPVirtual) steps {
		combine, finish := float32s.arithmetic(op, count)
		return steps{
			load: func(w int, from Mem) vector {
				acc := make(vector, fp8Registers(w))
				for i := range acc {
					acc[i] = f.widen(w, i, from)
				}
				return acc
			},
			combine: func(w int, acc vector, from Mem) {
				for i, v := range acc {
					combine(fp8Width(w), v, f.widen(w, i, from))
				}
			},
			finish: func(w int, acc vector) reg.VecVirtual {
				for _, v := range acc {
					finish(fp8Width(w), v)
					f.round(fp8Width(w), v)
				}
				return packBytes(w, acc)
			},
		}
	}
	return k
}

// fp8Registers returns the number of registers that w elements fill as float32.
func fp8Registers(w int) int { return max(1, w/8) }

// fp8Width returns the width of each of these registers.
func fp8Width(w int) int { return max(16, min(4*w, ymmBytes)) }

// widen loads the i-th register of w elements as float32.
func (f fp8Format) widen(w, i int, from Mem) reg.VecVirtual {
	halves := XMM()
	v := sized(fp8Width(w), YMM())
	if w >= 8 {
		from.Disp += 8 * i
		VPMOVZXBW(from, halves)
	} else {
		VPMOVZXBW(loadVector(w, from), halves)
	}
	f.toF16(halves)
	VCVTPH2PS(halves, v)
	if f.scale != 1 {
		VMULPS(constant32(math.Float32bits(f.scale)), v, v)
	}
	return v
}

// round replaces float32 values with the patterns of the nearest numbers.
func (f fp8Format) round(w int, v reg.VecVirtual) {
	const isUnordered = 3
	const bias32, mantissaBits32 = 127, 23
	shift := mantissaBits32 - f.mantissaBits
	rebias := uint32(bias32-f.bias) << mantissaBits32
	smallestNormal := rebias + 1<<mantissaBits32
	// The unit in the last place of this power of two is the unit of the subnormal numbers, so a sum with it is
	// rounded to a multiple of that unit.
	magic := uint32(bias32+1-f.bias+shift) << mantissaBits32

	sign := sized(w, YMM())
	nan := sized(w, YMM())
	normal := sized(w, YMM())
	subnormal := sized(w, YMM())
	odd := sized(w, YMM())

	VPSRLD(Imm(24), v, sign)
	VPAND(constant32(0x80), sign, sign)
	VPAND(constant32(0x7fffffff), v, v)
	VCMPPS(Imm(isUnordered), v, v, nan)
	VMINPS(constant32(math.Float32bits(f.largest)), v, v)

	VADDPS(constant32(magic), v, subnormal)
	VPSUBD(constant32(magic), subnormal, subnormal)
	VPCMPGTD(constant32(smallestNormal-1), v, normal)

	VPSRLD(Imm(uint64(shift)), v, odd)
	VPAND(constant32(1), odd, odd)
	VPADDD(constant32(uint32(1)<<(shift-1)-1-rebias), v, v)
	VPADDD(odd, v, v)
	VPSRLD(Imm(uint64(shift)), v, v)

	VBLENDVPS(normal, v, subnormal, v)
	VBLENDVPS(nan, constant32(f.nan), v, v)
	VPOR(sign, v, v)
}

// packBytes returns the lower bytes of all registers' 32-bit lanes in one register. Packing two registers interleaves
// their halves, which a permutation reverses at the end.
func packBytes(w int, acc vector) reg.VecVirtual {
	pair := func(i int) reg.VecVirtual {
		VPACKUSDW(acc[min(i+1, len(acc)-1)], acc[i], acc[i])
		return acc[i]
	}
	low := pair(0)
	high := low
	if len(acc) > 2 {
		high = pair(2)
	}
	VPACKUSWB(high, low, low)
	if fp8Width(w) == ymmBytes {
		order := YMM()
		VMOVDQU(avx.Table("interleave", 0, 4, 1, 5, 2, 6, 3, 7), order)
		VPERMD(low, order, low)
	}
	return low
}

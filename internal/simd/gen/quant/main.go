// Command quant writes the AVX2 kernels that quantize float32 in blocks of 64 with one scale, and the kernels for the
// way back.
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
	quantize("quantizeI8AVX2", 8)
	quantize("quantizeI4AVX2", 4)
	signs()
	groupSum()
	groupCenter()
	groupBins()
	groupHalves()
	groupBinSums()
	for _, k := range []struct {
		name string
		bits int
	}{{"dequantizeI8AVX2", 8}, {"dequantizeI4AVX2", 4}, {"dequantizeI2AVX2", 2}, {"dequantizeSignAVX2", 1}} {
		dequantize(k.name, k.bits)
	}
	Generate()
}

const (
	block   = 64
	vectors = 8 // registers of a block
)

func quantize(name string, bits int) {
	Kernel(name, "func(codes, scales *byte, src, lost []float32, highest float32) (done int)",
		name+" quantises blocks until one has a value that is not finite, or a scale near the ends of its",
		"range. If lost is not empty, it becomes what rounding loses.")
	codes := Load(Param("codes"), GP64())
	scales := Load(Param("scales"), GP64())
	lost := Load(Param("lost").Base(), GP64())
	keeps := Load(Param("lost").Len(), GP64())
	highest := Load(Param("highest"), XMM())
	one := Lanes(0x3f800000).AsX()
	top := YMM()
	whole := XMM()
	VCVTTPS2DQ(highest, whole)
	VPBROADCASTD(whole, top)
	bottom := Zero()
	VPSUBD(top, bottom, bottom)
	magnitude := Lanes(1<<31 - 1)
	order := loadTable("order", 0, 4, 1, 5, 2, 6, 3, 7)

	Blocks("src", func(src Register) {
		largest := YMM()
		v := YMM()
		VPAND(Mem{Base: src}, magnitude, largest)
		for i := 1; i < vectors; i++ {
			VPAND(Mem{Base: src, Disp: 32 * i}, magnitude, v)
			VPMAXSD(v, largest, largest)
		}
		x := Fold(largest, VPMAXSD)
		VDIVSS(highest, x, x) // a NaN or infinity stays as it is
		factor := storeScale(x, scales)
		inverse := YMM()
		VDIVSS(x, one, x)
		VBROADCASTSS(x, inverse)

		var q [vectors]VecVirtual
		for i := range q {
			q[i] = YMM()
			VMULPS(Mem{Base: src, Disp: 32 * i}, inverse, q[i])
			VCVTPS2DQ(q[i], q[i])
			VPMINSD(top, q[i], q[i])
			VPMAXSD(bottom, q[i], q[i])
			if i%4 < 3 {
				continue
			}
			// Half a block: 32 codes.
			CMPQ(keeps, Imm(0))
			name := "pack" + string(rune('0'+i))
			JE(LabelRef(name))
			for j := i - 3; j <= i; j++ {
				d := YMM()
				loss := YMM()
				VCVTDQ2PS(q[j], d)
				VMULPS(factor, d, d)
				VMOVUPS(Mem{Base: src, Disp: 32 * j}, loss)
				VSUBPS(d, loss, loss)
				VMOVUPS(loss, Mem{Base: lost, Disp: 32 * j})
			}
			Label(name)
			VPACKSSDW(q[i-2], q[i-3], q[i-3])
			VPACKSSDW(q[i], q[i-1], q[i-1])
			VPACKSSWB(q[i-1], q[i-3], q[i-3])
			VPERMD(q[i-3], order, q[i-3])
			if bits == 8 {
				VMOVDQU(q[i-3], Mem{Base: codes, Disp: 32 * (i / 4)})
			}
		}
		if bits == 4 {
			low := Lanes(0x0f0f0f0f)
			weights := Lanes(0x10011001)
			for _, r := range []VecVirtual{q[0], q[4]} {
				VPAND(low, r, r)
				VPMADDUBSW(weights, r, r)
			}
			VPACKUSWB(q[4], q[0], q[0])
			VPERMQ(Imm(0b11_01_10_00), q[0], q[0])
			VMOVDQU(q[0], Mem{Base: codes})
		}
	}, Step{lost, 4 * block}, Step{scales, 2}, Step{codes, block * bits / 8})
}

// signs adds magnitudes as CodecSign specifies: the upper half to the lower half.
func signs() {
	Kernel("quantizeSignAVX2", "func(codes, scales *byte, src, lost []float32) (done int)",
		"quantizeSignAVX2 writes the signs and the mean magnitudes of blocks, until one has a value that is not",
		"finite, or a mean near the ends of its range. If lost is not empty, it becomes what rounding loses.")
	codes := Load(Param("codes"), GP64())
	scales := Load(Param("scales"), GP64())
	lost := Load(Param("lost").Base(), GP64())
	keeps := Load(Param("lost").Len(), GP64())
	magnitude := Lanes(1<<31 - 1)
	sign := Lanes(1 << 31)
	share := Lanes(0x3c800000)
	bound := Lanes(0x7f7fffff)
	Blocks("src", func(src Register) {
		var v [vectors]VecVirtual
		largest := Zero()
		for i := range v {
			v[i] = YMM()
			VPAND(Mem{Base: src, Disp: 32 * i}, magnitude, v[i])
			VPMAXSD(v[i], largest, largest)
			VMULPS(share, v[i], v[i])
			if i >= vectors/2 {
				VADDPS(v[i], v[i-vectors/2], v[i-vectors/2])
			}
		}
		VPCMPGTD(bound, largest, largest)
		odd := GP32()
		VPMOVMSKB(largest, odd)
		TESTL(odd, odd)
		JNE(LabelRef("end"))
		VADDPS(v[2], v[0], v[0])
		VADDPS(v[3], v[1], v[1])
		VADDPS(v[1], v[0], v[0])
		x := Fold(v[0], VADDPS)
		factor := storeScale(x, scales)
		for i := range vectors {
			bits := GP32()
			loss := YMM()
			VMOVUPS(Mem{Base: src, Disp: 32 * i}, loss)
			VMOVMSKPS(loss, bits)
			MOVB(bits.As8(), Mem{Base: codes, Disp: i})
		}
		CMPQ(keeps, Imm(0))
		JE(LabelRef("next"))
		for i := range vectors {
			loss := YMM()
			d := YMM()
			VMOVUPS(Mem{Base: src, Disp: 32 * i}, loss)
			VANDPS(loss, sign, d)
			VXORPS(factor, d, d)
			VSUBPS(d, loss, loss)
			VMOVUPS(loss, Mem{Base: lost, Disp: 32 * i})
		}
		Label("next")
	}, Step{lost, 4 * block}, Step{scales, 2}, Step{codes, block / 8})
}

// storeScale rounds the first lane of x to BF16 and stores it, or jumps to the end if it is near the ends of the
// range. It returns the rounded number in all lanes.
func storeScale(x VecVirtual, to Register) VecVirtual {
	scale := GP32()
	odd := GP32()
	check := GP32()
	VMOVD(x, scale)
	MOVL(scale, odd)
	SHRL(Imm(16), odd)
	ANDL(Imm(1), odd)
	LEAL(Mem{Base: scale, Index: odd, Scale: 1, Disp: 0x7fff}, scale)
	ANDL(U32(0xffff0000), scale)
	LEAL(Mem{Base: scale, Disp: -0x01000000}, check) // above 2^-125, below 2^110
	CMPL(check, U32(0x75000000))
	JAE(LabelRef("end"))
	factor := YMM()
	VMOVD(scale, x)
	VPBROADCASTD(x, factor)
	SHRL(Imm(16), scale)
	MOVW(scale.As16(), Mem{Base: to})
	return factor
}

// columns walks over a group of 4096 elements in the order of CodecI2's partial sums: four columns of 256 elements,
// in 16 rows each. body gets the first row's place, and repeat writes the code for a row.
func columns(body func(index Register, rows func(row func(disp int)))) {
	index := GP64()
	XORQ(index, index)
	Label("columns")
	body(index, func(row func(disp int)) {
		for r := range 16 {
			row(r * 256)
		}
	})
	ADDQ(Imm(4), index)
	CMPQ(index, U32(256))
	JL(LabelRef("columns"))
	VZEROUPPER()
	RET()
}

func groupSum() {
	Kernel("groupSumAVX2", "func(x *float32, parts *[256]float64)", "groupSumAVX2 stores the partial sums of a group.")
	x := Load(Param("x"), GP64())
	parts := Load(Param("parts"), GP64())
	columns(func(index Register, rows func(func(int))) {
		sum := Zero()
		rows(func(disp int) {
			v := YMM()
			VCVTPS2PD(Mem{Base: x, Index: index, Scale: 4, Disp: 4 * disp}, v)
			VADDPD(v, sum, sum)
		})
		VMOVUPD(sum, Mem{Base: parts, Index: index, Scale: 8})
	})
}

func groupCenter() {
	Kernel("groupCenterAVX2", "func(centered, x *float32, shift float32, parts *[256]float64)",
		"groupCenterAVX2 stores the values of a group less shift, and the partial sums of their squares.")
	x := Load(Param("x"), GP64())
	parts := Load(Param("parts"), GP64())
	to := Load(Param("centered"), GP64())
	shift := XMM()
	VBROADCASTSS(Address(Param("shift")), shift)
	columns(func(index Register, rows func(func(int))) {
		sum := Zero()
		rows(func(disp int) {
			c := XMM()
			v := YMM()
			VMOVUPS(Mem{Base: x, Index: index, Scale: 4, Disp: 4 * disp}, c)
			VSUBPS(shift, c, c)
			VMOVUPS(c, Mem{Base: to, Index: index, Scale: 4, Disp: 4 * disp})
			VCVTPS2PD(c, v)
			VMULPD(v, v, v)
			VADDPD(v, sum, sum)
		})
		VMOVUPD(sum, Mem{Base: parts, Index: index, Scale: 8})
	})
}

func groupBins() {
	Kernel("groupBinsAVX2", "func(bins *byte, centered *float32, scale float32)",
		"groupBinsAVX2 stores the bins of a group.")
	bins := Load(Param("bins"), GP64())
	x := Load(Param("centered"), GP64())
	scale := YMM()
	VBROADCASTSS(Address(Param("scale")), scale)
	two := Lanes(0x40000000)
	lowest := Lanes(0xbf800000)
	highest := Lanes(0x40800000)
	order := loadTable("order", 0, 4, 1, 5, 2, 6, 3, 7)
	nothing := Zero()
	three := Lanes(3)
	left := GP64()
	MOVQ(U32(4096/32), left)
	Repeat(left, func() {
		var q [4]VecVirtual
		for i := range q {
			q[i] = YMM()
			VMOVUPS(Mem{Base: x, Disp: 32 * i}, q[i])
			VDIVPS(scale, q[i], q[i])
			VADDPS(two, q[i], q[i])
			VMAXPS(lowest, q[i], q[i])
			VMINPS(highest, q[i], q[i])
			VCVTPS2DQ(q[i], q[i])
			VPMAXSD(nothing, q[i], q[i])
			VPMINSD(three, q[i], q[i])
		}
		VPACKSSDW(q[1], q[0], q[0])
		VPACKSSDW(q[3], q[2], q[2])
		VPACKSSWB(q[2], q[0], q[0])
		VPERMD(q[0], order, q[0])
		VMOVDQU(q[0], Mem{Base: bins})
		ADDQ(Imm(32), bins)
		ADDQ(U32(128), x)
	})
	VZEROUPPER()
	RET()
}

// groupHalves gives values codes from 0 to 3: large negative, small negative, small positive, large positive. A code
// is 2, minus one for a negative value. A large value adds one if it is not negative and subtracts one if it is.
func groupHalves() {
	Kernel("groupHalvesAVX2", "func(bins *byte, x *float32, threshold, negative uint32)",
		"groupHalvesAVX2 stores the halves of a group, of which larger ones have magnitudes from a threshold on.")
	bins := Load(Param("bins"), GP64())
	x := Load(Param("x"), GP64())
	one := Lanes(1)
	magnitude := Lanes(0x7fffffff)
	two := Lanes(2)
	var bounds [2]VecVirtual // the largest of the small values
	for i, name := range []string{"threshold", "negative"} {
		bounds[i] = YMM()
		r := Load(Param(name), GP32())
		bounds[i] = Broadcast(r)
		VPSUBD(one, bounds[i], bounds[i])
	}
	order := loadTable("order", 0, 4, 1, 5, 2, 6, 3, 7)
	left := GP64()
	MOVQ(U32(4096/32), left)
	Repeat(left, func() {
		var q [4]VecVirtual
		for i := range q {
			q[i] = YMM()
			bound := YMM()
			sign := YMM()
			VMOVUPS(Mem{Base: x, Disp: 32 * i}, sign)
			VBLENDVPS(sign, bounds[1], bounds[0], bound)
			VPAND(magnitude, sign, q[i])
			VPCMPGTD(bound, q[i], q[i]) // -1 for large values
			VPSRAD(Imm(31), sign, sign)
			VPXOR(sign, q[i], q[i])
			VPSUBD(q[i], two, q[i]) // 3 or 2, and with a sign 2 or 3
			VPADDD(sign, q[i], q[i])
			VPADDD(sign, q[i], q[i])
		}
		VPACKSSDW(q[1], q[0], q[0])
		VPACKSSDW(q[3], q[2], q[2])
		VPACKSSWB(q[2], q[0], q[0])
		VPERMD(q[0], order, q[0])
		VMOVDQU(q[0], Mem{Base: bins})
		ADDQ(Imm(32), bins)
		ADDQ(U32(128), x)
	})
	VZEROUPPER()
	RET()
}

func groupBinSums() {
	Kernel("groupBinSumsAVX2", "func(bins *byte, centered *float32, parts *[4][256]float64)",
		"groupBinSumsAVX2 stores the partial sums of the values of a group in each bin.")
	bins := Load(Param("bins"), GP64())
	x := Load(Param("centered"), GP64())
	parts := Load(Param("parts"), GP64())
	var numbers [4]VecVirtual
	for b := range numbers {
		numbers[b] = Lanes(uint32(b))
		VPSRLQ(Imm(32), numbers[b], numbers[b])
	}
	columns(func(index Register, rows func(func(int))) {
		sums := [4]VecVirtual{Zero(), Zero(), Zero(), Zero()}
		rows(func(disp int) {
			v := YMM()
			b := YMM()
			VCVTPS2PD(Mem{Base: x, Index: index, Scale: 4, Disp: 4 * disp}, v)
			VPMOVZXBQ(Mem{Base: bins, Index: index, Scale: 1, Disp: disp}, b)
			for i, sum := range sums {
				hit := YMM()
				VPCMPEQQ(numbers[i], b, hit)
				VANDPD(v, hit, hit)
				VADDPD(hit, sum, sum)
			}
		})
		for i, sum := range sums {
			VMOVUPD(sum, Mem{Base: parts, Index: index, Scale: 8, Disp: 2048 * i})
		}
	})
}

func loadTable(name string, words ...uint32) VecVirtual {
	v := YMM()
	VMOVDQU(Table(name, words...), v)
	return v
}

func dequantize(name string, bits int) {
	Kernel(name, "func(dst []float32, codes, scales *byte, add bool) (done int)",
		name+" stores or adds the values of blocks", "until one has a value that is not finite.")
	codes := Load(Param("codes"), GP64())
	scales := Load(Param("scales"), GP64())
	add := GP32()
	perBlock := 2
	MOVBLZX(Address(Param("add")), add)
	var low, nan, eight, counts, sign, table VecVirtual
	switch bits {
	case 8:
		nan = Lanes(0x80808080)
	case 4:
		low = Lanes(0x0f0f0f0f)
		nan = Lanes(0x08080808)
		eight = Lanes(0x08080808)
	case 2:
		table = YMM()
		counts = loadTable("counts2", 0, 2, 4, 6, 8, 10, 12, 14)
		perBlock = 0
		VBROADCASTI128(Mem{Base: scales}, table)
	case 1:
		counts = loadTable("counts1", 31, 30, 29, 28, 27, 26, 25, 24)
		sign = Lanes(1 << 31)
	}
	Blocks("dst", func(dst Register) {
		var factor VecVirtual
		if bits != 2 {
			r := GP32()
			MOVWLZX(Mem{Base: scales}, r)
			SHLL(Imm(16), r)
			factor = Broadcast(r)
		}
		var nibbles [2]VecVirtual
		if bits > 2 {
			hits := YMM()
			upper := YMM()
			mask := GP32()
			if bits == 8 {
				VPCMPEQB(Mem{Base: codes}, nan, hits)
				VPCMPEQB(Mem{Base: codes, Disp: 32}, nan, upper)
			} else {
				c := YMM()
				high := YMM()
				VMOVDQU(Mem{Base: codes}, c)
				VPSRLW(Imm(4), c, high)
				VPAND(low, c, c)
				VPAND(low, high, high)
				VPCMPEQB(c, nan, hits)
				VPCMPEQB(high, nan, upper)
				// Signs: (x ^ 8) - 8.
				VPXOR(eight, c, c)
				VPSUBB(eight, c, c)
				VPXOR(eight, high, high)
				VPSUBB(eight, high, high)
				nibbles[0] = YMM()
				nibbles[1] = YMM()
				VPUNPCKLBW(high, c, nibbles[0]) // codes 0 to 15, and 32 to 47
				VPUNPCKHBW(high, c, nibbles[1])
			}
			VPOR(hits, upper, hits)
			VPMOVMSKB(hits, mask)
			TESTL(mask, mask)
			JNE(LabelRef("end"))
		}
		var value [vectors]VecVirtual
		for i := range value {
			value[i] = YMM()
			switch bits {
			case 8:
				VPMOVSXBD(Mem{Base: codes, Disp: 8 * i}, value[i])
			case 4:
				half := XMM()
				VEXTRACTI128(Imm(uint64(i/4)), nibbles[i/2%2], half)
				if i%2 == 1 {
					VPSRLDQ(Imm(8), half, half)
				}
				VPMOVSXBD(half, value[i])
			case 2:
				VPBROADCASTW(Mem{Base: codes, Disp: 2 * i}, value[i])
				VPSRLVD(counts, value[i], value[i])
				VPERMILPS(value[i], table, value[i])
			case 1:
				VPBROADCASTB(Mem{Base: codes, Disp: i}, value[i])
				VPSLLVD(counts, value[i], value[i])
				VPAND(sign, value[i], value[i])
				VPXOR(factor, value[i], value[i])
			}
			if bits > 2 {
				VCVTDQ2PS(value[i], value[i])
				VMULPS(factor, value[i], value[i])
			}
		}
		TESTL(add, add)
		JE(LabelRef("store"))
		for i, v := range value {
			VADDPS(Mem{Base: dst, Disp: 32 * i}, v, v)
		}
		Label("store")
		for i, v := range value {
			VMOVUPS(v, Mem{Base: dst, Disp: 32 * i})
		}
	}, Step{scales, perBlock}, Step{codes, block * bits / 8})
}

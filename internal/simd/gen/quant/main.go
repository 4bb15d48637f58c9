// Command quant writes the AVX2 kernels that quantise float32 by blocks of 64 with one scale, and the
// way back.
//
// Each kernel handles whole blocks from the start of its slices, as long as they hold nothing out of
// the ordinary, and returns how many blocks that were; the Go code that calls it does the rest.
package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

func main() {
	quantize("quantizeI8AVX2", 8)
	quantize("quantizeI4AVX2", 4)
	signs()
	groupSum()
	groupCenter()
	groupBins()
	groupBinSums()
	for _, k := range []struct {
		name string
		bits int
	}{{"dequantizeI8AVX2", 8}, {"dequantizeI4AVX2", 4}, {"dequantizeSignAVX2", 1}} {
		dequantize(k.name, k.bits)
	}
	table()
	Generate()
}

const (
	block   = 64
	vectors = 8 // registers of a block
)

func kernel(name, signature string, doc ...string) {
	TEXT(name, NOSPLIT, signature)
	Pragma("noescape")
	Doc(doc...)
}

// constant returns a vector with the 32 bits of v in all lanes.
func constant(v uint32) VecVirtual {
	r, x, y := GP32(), XMM(), YMM()
	MOVL(U32(v), r)
	VMOVD(r, x)
	VPBROADCASTD(x, y)
	return y
}

// maximum returns the largest lane of v, as a signed integer.
func maximum(v VecVirtual) VecVirtual {
	low, high := XMM(), XMM()
	VEXTRACTI128(Imm(1), v, high)
	VPMAXSD(v.AsX(), high, low)
	for _, order := range []uint8{0b01_00_11_10, 0b00_00_00_01} {
		VPSHUFD(U8(order), low, high)
		VPMAXSD(low, high, low)
	}
	return low
}

func quantize(name string, bits int) {
	kernel(name, "func(codes, scales *byte, src, lost []float32, most float32) (done int)",
		name+" quantises blocks until one has a value that is not finite, or a scale near the ends of its",
		"range. If lost is not empty, it becomes what rounding loses.")
	codes, scales := Load(Param("codes"), GP64()), Load(Param("scales"), GP64())
	src, blocks := Load(Param("src").Base(), GP64()), Load(Param("src").Len(), GP64())
	SHRQ(Imm(6), blocks)
	lost, keeps := Load(Param("lost").Base(), GP64()), Load(Param("lost").Len(), GP64())
	most := Load(Param("most"), XMM())
	done := GP64()
	XORQ(done, done)
	one, oneBits := XMM(), GP32()
	MOVL(U32(0x3f800000), oneBits)
	VMOVD(oneBits, one)
	top, bottom := YMM(), YMM()
	{
		x := XMM()
		VCVTTPS2DQ(most, x)
		VPBROADCASTD(x, top)
	}
	VPXOR(bottom, bottom, bottom)
	VPSUBD(top, bottom, bottom)
	ones := YMM()
	VPCMPEQD(ones, ones, ones)
	magnitude := YMM()
	VPSRLD(Imm(1), ones, magnitude)
	order := YMM()
	VMOVDQU(lanes("order", 0, 4, 1, 5, 2, 6, 3, 7), order)

	Label("block")
	CMPQ(done, blocks)
	JGE(LabelRef("end"))
	largest, v := YMM(), YMM()
	VPAND(Mem{Base: src}, magnitude, largest)
	for i := 1; i < vectors; i++ {
		VPAND(Mem{Base: src, Disp: 32 * i}, magnitude, v)
		VPMAXSD(v, largest, largest)
	}
	x := maximum(largest)
	VDIVSS(most, x, x) // a NaN or infinity stays one
	scale := roundScale(x)
	factor, inverse := YMM(), YMM()
	VMOVD(scale, x)
	VPBROADCASTD(x, factor)
	VDIVSS(x, one, x)
	VBROADCASTSS(x, inverse)
	SHRL(Imm(16), scale)
	MOVW(scale.As16(), Mem{Base: scales})

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
			d, rest := YMM(), YMM()
			VCVTDQ2PS(q[j], d)
			VMULPS(factor, d, d)
			VMOVUPS(Mem{Base: src, Disp: 32 * j}, rest)
			VSUBPS(d, rest, rest)
			VMOVUPS(rest, Mem{Base: lost, Disp: 32 * j})
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
		low, weights := constant(0x0f0f0f0f), constant(0x10011001)
		for _, r := range []VecVirtual{q[0], q[4]} {
			VPAND(low, r, r)
			VPMADDUBSW(weights, r, r)
		}
		VPACKUSWB(q[4], q[0], q[0])
		VPERMQ(Imm(0b11_01_10_00), q[0], q[0])
		VMOVDQU(q[0], Mem{Base: codes})
	}
	ADDQ(U32(block*4), src)
	ADDQ(U32(block*4), lost)
	ADDQ(Imm(2), scales)
	ADDQ(Imm(uint64(block*bits/8)), codes)
	INCQ(done)
	JMP(LabelRef("block"))
	Label("end")
	VZEROUPPER()
	Store(done, ReturnIndex(0))
	RET()
}

// signs adds magnitudes as CodecSign is specified: the upper half onto the lower one.
func signs() {
	kernel("quantizeSignAVX2", "func(codes, scales *byte, src, lost []float32) (done int)",
		"quantizeSignAVX2 writes the signs and the mean magnitudes of blocks, until one has a value that is not",
		"finite, or a mean near the ends of its range. If lost is not empty, it becomes what rounding loses.")
	codes, scales := Load(Param("codes"), GP64()), Load(Param("scales"), GP64())
	src, blocks := Load(Param("src").Base(), GP64()), Load(Param("src").Len(), GP64())
	SHRQ(Imm(6), blocks)
	lost, keeps := Load(Param("lost").Base(), GP64()), Load(Param("lost").Len(), GP64())
	done := GP64()
	XORQ(done, done)
	magnitude, sign, share, bound := constant(1<<31-1), constant(1<<31), constant(0x3c800000), constant(0x7f7fffff)
	Label("block")
	CMPQ(done, blocks)
	JGE(LabelRef("end"))
	var v [vectors]VecVirtual
	largest := YMM()
	VPXOR(largest, largest, largest)
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
	x, y := XMM(), XMM()
	VEXTRACTF128(Imm(1), v[0], x)
	VADDPS(x, v[0].AsX(), x)
	for _, order := range []uint8{0b01_00_11_10, 0b00_00_00_01} {
		VPSHUFD(U8(order), x, y)
		VADDPS(y, x, x)
	}
	mean := roundScale(x)
	factor := YMM()
	VMOVD(mean, x)
	VPBROADCASTD(x, factor)
	SHRL(Imm(16), mean)
	MOVW(mean.As16(), Mem{Base: scales})
	for i := range vectors {
		bits, rest := GP32(), YMM()
		VMOVUPS(Mem{Base: src, Disp: 32 * i}, rest)
		VMOVMSKPS(rest, bits)
		MOVB(bits.As8(), Mem{Base: codes, Disp: i})
	}
	CMPQ(keeps, Imm(0))
	JE(LabelRef("next"))
	for i := range vectors {
		rest, d := YMM(), YMM()
		VMOVUPS(Mem{Base: src, Disp: 32 * i}, rest)
		VANDPS(rest, sign, d)
		VXORPS(factor, d, d)
		VSUBPS(d, rest, rest)
		VMOVUPS(rest, Mem{Base: lost, Disp: 32 * i})
	}
	Label("next")
	ADDQ(U32(block*4), src)
	ADDQ(U32(block*4), lost)
	ADDQ(Imm(2), scales)
	ADDQ(Imm(block/8), codes)
	INCQ(done)
	JMP(LabelRef("block"))
	Label("end")
	VZEROUPPER()
	Store(done, ReturnIndex(0))
	RET()
}

// roundScale rounds the first lane of x to BF16, and goes to the end if it is near the ends of the range.
func roundScale(x VecVirtual) GPVirtual {
	scale, odd, check := GP32(), GP32(), GP32()
	VMOVD(x, scale)
	MOVL(scale, odd)
	SHRL(Imm(16), odd)
	ANDL(Imm(1), odd)
	LEAL(Mem{Base: scale, Index: odd, Scale: 1, Disp: 0x7fff}, scale)
	ANDL(U32(0xffff0000), scale)
	LEAL(Mem{Base: scale, Disp: -0x01000000}, check) // above 2^-125, below 2^110
	CMPL(check, U32(0x75000000))
	JAE(LabelRef("end"))
	return scale
}

// columns walks over a group of 4096 elements as the partial sums of CodecI2 do: by four columns of 256, of
// 16 rows each. body gets the first row's place, and repeat writes what is done for a row.
func columns(body func(at Register, rows func(row func(disp int)))) {
	at := GP64()
	XORQ(at, at)
	Label("columns")
	body(at, func(row func(disp int)) {
		for r := range 16 {
			row(r * 256)
		}
	})
	ADDQ(Imm(4), at)
	CMPQ(at, U32(256))
	JL(LabelRef("columns"))
	VZEROUPPER()
	RET()
}

func zero() VecVirtual {
	v := YMM()
	VPXOR(v, v, v)
	return v
}

func groupSum() {
	kernel("groupSumAVX2", "func(x *float32, parts *[256]float64)", "groupSumAVX2 stores the partial sums of a group.")
	x, parts := Load(Param("x"), GP64()), Load(Param("parts"), GP64())
	columns(func(at Register, rows func(func(int))) {
		sum := zero()
		rows(func(disp int) {
			v := YMM()
			VCVTPS2PD(Mem{Base: x, Index: at, Scale: 4, Disp: 4 * disp}, v)
			VADDPD(v, sum, sum)
		})
		VMOVUPD(sum, Mem{Base: parts, Index: at, Scale: 8})
	})
}

func groupCenter() {
	kernel("groupCenterAVX2", "func(centered, x *float32, shift float32, parts *[256]float64)",
		"groupCenterAVX2 stores the values of a group less shift, and the partial sums of their squares.")
	x, parts, to := Load(Param("x"), GP64()), Load(Param("parts"), GP64()), Load(Param("centered"), GP64())
	shift := XMM()
	VBROADCASTSS(param("shift"), shift)
	columns(func(at Register, rows func(func(int))) {
		sum := zero()
		rows(func(disp int) {
			c, v := XMM(), YMM()
			VMOVUPS(Mem{Base: x, Index: at, Scale: 4, Disp: 4 * disp}, c)
			VSUBPS(shift, c, c)
			VMOVUPS(c, Mem{Base: to, Index: at, Scale: 4, Disp: 4 * disp})
			VCVTPS2PD(c, v)
			VMULPD(v, v, v)
			VADDPD(v, sum, sum)
		})
		VMOVUPD(sum, Mem{Base: parts, Index: at, Scale: 8})
	})
}

func groupBins() {
	kernel("groupBinsAVX2", "func(bins *byte, centered *float32, scale float32)", "groupBinsAVX2 stores the bins of a group.")
	bins, x := Load(Param("bins"), GP64()), Load(Param("centered"), GP64())
	scale := YMM()
	VBROADCASTSS(param("scale"), scale)
	two, least, most, order := constant(0x40000000), constant(0xbf800000), constant(0x40800000), loadOnce("order", 0, 4, 1, 5, 2, 6, 3, 7)
	nothing, three, left := zero(), constant(3), GP64()
	MOVQ(U32(4096/32), left)
	Label("bins")
	var q [4]VecVirtual
	for i := range q {
		q[i] = YMM()
		VMOVUPS(Mem{Base: x, Disp: 32 * i}, q[i])
		VDIVPS(scale, q[i], q[i])
		VADDPS(two, q[i], q[i])
		VMAXPS(least, q[i], q[i])
		VMINPS(most, q[i], q[i])
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
	DECQ(left)
	JNZ(LabelRef("bins"))
	VZEROUPPER()
	RET()
}

func groupBinSums() {
	kernel("groupBinSumsAVX2", "func(bins *byte, centered *float32, parts *[4][256]float64)",
		"groupBinSumsAVX2 stores the partial sums of the values of a group in each bin.")
	bins, x, parts := Load(Param("bins"), GP64()), Load(Param("centered"), GP64()), Load(Param("parts"), GP64())
	var numbers [4]VecVirtual
	for b := range numbers {
		numbers[b] = constant(uint32(b))
		VPSRLQ(Imm(32), numbers[b], numbers[b])
	}
	columns(func(at Register, rows func(func(int))) {
		sums := [4]VecVirtual{zero(), zero(), zero(), zero()}
		rows(func(disp int) {
			v, b := YMM(), YMM()
			VCVTPS2PD(Mem{Base: x, Index: at, Scale: 4, Disp: 4 * disp}, v)
			VPMOVZXBQ(Mem{Base: bins, Index: at, Scale: 1, Disp: disp}, b)
			for i, sum := range sums {
				hit := YMM()
				VPCMPEQQ(numbers[i], b, hit)
				VANDPD(v, hit, hit)
				VADDPD(hit, sum, sum)
			}
		})
		for i, sum := range sums {
			VMOVUPD(sum, Mem{Base: parts, Index: at, Scale: 8, Disp: 2048 * i})
		}
	})
}

var tables = map[string]Mem{}

// lanes returns a table of eight words.
func lanes(name string, words ...uint32) Mem {
	if m, ok := tables[name]; ok {
		return m
	}
	table := GLOBL(name, RODATA|NOPTR)
	for i, w := range words {
		DATA(4*i, U32(w))
	}
	tables[name] = table
	return table
}

func loadOnce(name string, words ...uint32) VecVirtual {
	v := YMM()
	VMOVDQU(lanes(name, words...), v)
	return v
}

func dequantize(name string, bits int) {
	kernel(name, "func(dst []float32, codes, scales *byte, add bool) (done int)",
		name+" stores or adds the values of blocks", "until one has a value that is not finite.")
	codes, scales := Load(Param("codes"), GP64()), Load(Param("scales"), GP64())
	dst, blocks := Load(Param("dst").Base(), GP64()), Load(Param("dst").Len(), GP64())
	SHRQ(Imm(6), blocks)
	add := GP32()
	MOVBLZX(param("add"), add)
	done := GP64()
	XORQ(done, done)
	var low, nan, eight, counts, sign VecVirtual
	switch bits {
	case 8:
		nan = constant(0x80808080)
	case 4:
		low, nan, eight = constant(0x0f0f0f0f), constant(0x08080808), constant(0x08080808)
	case 1:
		counts, sign = loadOnce("counts1", 31, 30, 29, 28, 27, 26, 25, 24), constant(1<<31)
	}
	Label("block")
	CMPQ(done, blocks)
	JGE(LabelRef("end"))
	factor := YMM()
	{
		r, x := GP32(), XMM()
		MOVWLZX(Mem{Base: scales}, r)
		SHLL(Imm(16), r)
		VMOVD(r, x)
		VPBROADCASTD(x, factor)
	}
	at := func(i int) Mem { return Mem{Base: codes, Disp: 8 * i} }
	var nibbles [2]VecVirtual
	if bits > 1 {
		hits, other := YMM(), YMM()
		mask := GP32()
		if bits == 8 {
			VPCMPEQB(Mem{Base: codes}, nan, hits)
			VPCMPEQB(Mem{Base: codes, Disp: 32}, nan, other)
		} else {
			c, high := YMM(), YMM()
			VMOVDQU(Mem{Base: codes}, c)
			VPSRLW(Imm(4), c, high)
			VPAND(low, c, c)
			VPAND(low, high, high)
			VPCMPEQB(c, nan, hits)
			VPCMPEQB(high, nan, other)
			// Signs: (x ^ 8) - 8.
			VPXOR(eight, c, c)
			VPSUBB(eight, c, c)
			VPXOR(eight, high, high)
			VPSUBB(eight, high, high)
			nibbles[0], nibbles[1] = YMM(), YMM()
			VPUNPCKLBW(high, c, nibbles[0]) // codes 0 to 15, and 32 to 47
			VPUNPCKHBW(high, c, nibbles[1])
		}
		VPOR(hits, other, hits)
		VPMOVMSKB(hits, mask)
		TESTL(mask, mask)
		JNE(LabelRef("end"))
	}
	var value [vectors]VecVirtual
	for i := range value {
		value[i] = YMM()
		switch bits {
		case 8:
			VPMOVSXBD(at(i), value[i])
		case 4:
			half := XMM()
			from := nibbles[i/2%2]
			VEXTRACTI128(Imm(uint64(i/4)), from, half)
			if i%2 == 1 {
				VPSRLDQ(Imm(8), half, half)
			}
			VPMOVSXBD(half, value[i])
		case 1:
			VPBROADCASTB(Mem{Base: codes, Disp: i}, value[i])
			VPSLLVD(counts, value[i], value[i])
			VPAND(sign, value[i], value[i])
			VPXOR(factor, value[i], value[i])
		}
		if bits > 1 {
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
	ADDQ(U32(block*4), dst)
	ADDQ(Imm(2), scales)
	ADDQ(Imm(uint64(block*bits/8)), codes)
	INCQ(done)
	JMP(LabelRef("block"))
	Label("end")
	VZEROUPPER()
	Store(done, ReturnIndex(0))
	RET()
}

func param(name string) Mem {
	m, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return m.Addr
}

// table looks up values of two bits.
func table() {
	kernel("dequantizeI2AVX2", "func(dst []float32, codes *byte, table *byte, add bool) (done int)",
		"dequantizeI2AVX2 stores or adds whole blocks of 64 values, whose codes name one of four in the table.")
	codes, from := Load(Param("codes"), GP64()), Load(Param("table"), GP64())
	dst, blocks := Load(Param("dst").Base(), GP64()), Load(Param("dst").Len(), GP64())
	SHRQ(Imm(6), blocks)
	add := GP32()
	MOVBLZX(param("add"), add)
	values := YMM()
	VBROADCASTI128(Mem{Base: from}, values)
	counts := loadOnce("counts2", 0, 2, 4, 6, 8, 10, 12, 14)
	done := GP64()
	XORQ(done, done)
	Label("block")
	CMPQ(done, blocks)
	JGE(LabelRef("end"))
	var v [vectors]VecVirtual
	for i := range v {
		v[i] = YMM()
		VPBROADCASTW(Mem{Base: codes, Disp: 2 * i}, v[i])
		VPSRLVD(counts, v[i], v[i])
		VPERMILPS(v[i], values, v[i])
	}
	TESTL(add, add)
	JE(LabelRef("store"))
	for i := range v {
		VADDPS(Mem{Base: dst, Disp: 32 * i}, v[i], v[i])
	}
	Label("store")
	for i := range v {
		VMOVUPS(v[i], Mem{Base: dst, Disp: 32 * i})
	}
	ADDQ(U32(block*4), dst)
	ADDQ(Imm(block/4), codes)
	INCQ(done)
	JMP(LabelRef("block"))
	Label("end")
	VZEROUPPER()
	Store(done, ReturnIndex(0))
	RET()
}

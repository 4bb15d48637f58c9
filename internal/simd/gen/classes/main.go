// Command classes writes the AVX2 kernels that list, count and find classes of elements.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"

	. "github.com/tutti-go/tutti/internal/simd/gen/avx"
)

func main() {
	list(2)
	list(4)
	count()
	find()
	Generate()
}

const (
	vectors   = 8  // of a chunk
	maxSpan   = 32 // number of counted classes
	countSize = 2  // bytes
)

// list shifts elements so that their classes are the lowest bytes, and packs those bytes.
func list(size int) {
	Kernel(fmt.Sprintf("list%dAVX2", size), "func(classes *byte, data *byte, rounds int)",
		fmt.Sprintf("list%dAVX2 lists the classes of elements of %d bytes, of 32 in each of at least one round.", size, size))
	classes := Load(Param("classes"), GP64())
	data := Load(Param("data"), GP64())
	rounds := Load(Param("rounds"), GP64())
	var order VecVirtual
	if size == 4 {
		order = YMM() // packing twice interleaves the quarters of the two halves
		VMOVDQU(Table("quarters", 0, 4, 1, 5, 2, 6, 3, 7), order)
	}
	Repeat(rounds, func() {
		var parts [4]VecVirtual
		for i := range size {
			part := YMM()
			VMOVDQU(Mem{Base: data}.Offset(32*i), part)
			if size == 2 {
				VPSLLW(Imm(1), part, part)
				VPSRLW(Imm(8), part, part)
			} else {
				VPSLLD(Imm(1), part, part)
				VPSRLD(Imm(24), part, part)
			}
			parts[i] = part
		}
		packed := YMM()
		if size == 2 {
			VPACKUSWB(parts[1], parts[0], packed)
			VPERMQ(Imm(0b11_01_10_00), packed, packed)
		} else {
			VPACKUSDW(parts[1], parts[0], parts[0])
			VPACKUSDW(parts[3], parts[2], parts[2])
			VPACKUSWB(parts[2], parts[0], packed)
			VPERMD(packed, order, packed)
		}
		VMOVDQU(packed, Mem{Base: classes})
		ADDQ(Imm(32), classes)
		ADDQ(Imm(uint64(32*size)), data)
	})
	VZEROUPPER()
	RET()
}

// count finds the lowest and the highest class, and counts each class between them.
func count() {
	Kernel("countAVX2", "func(chunk *byte, counts *uint16) (lowest, span int)",
		"countAVX2 counts the classes of a chunk, from the lowest one on. It returns how many classes there are from the",
		"lowest to the highest one. If these are more than 32, it counts none.")
	chunk := Load(Param("chunk"), GP64())
	counts := Load(Param("counts"), GP64())
	var data [vectors]VecVirtual
	minimum := YMM()
	maximum := YMM()
	for i := range data {
		data[i] = YMM()
		VMOVDQU(Mem{Base: chunk}.Offset(32*i), data[i])
		if i == 0 {
			VMOVDQA(data[i], minimum)
			VMOVDQA(data[i], maximum)
			continue
		}
		VPMINUB(data[i], minimum, minimum)
		VPMAXUB(data[i], maximum, maximum)
	}
	ones := YMM()
	VPCMPEQB(ones, ones, ones)
	VPXOR(ones, maximum, maximum) // the highest byte is the complement of the lowest complement
	lowest := minimumByte(minimum)
	highest := minimumByte(maximum)
	NOTL(highest)
	MOVBLZX(highest.As8(), highest)
	Store(lowest.As64(), Return("lowest"))
	span := GP64()
	LEAQ(Mem{Base: highest.As64(), Disp: 1}, span)
	SUBQ(lowest.As64(), span)
	Store(span, Return("span"))
	CMPQ(span, Imm(maxSpan))
	JG(LabelRef("done"))

	zero := Zero()
	class := YMM()
	one := YMM()
	x := XMM()
	VMOVD(lowest, x)
	VPBROADCASTB(x, class)
	VPABSB(ones, one)
	Repeat(span, func() {
		sum := YMM()
		equal := YMM()
		VPCMPEQB(data[0], class, sum)
		for _, v := range data[1:] {
			VPCMPEQB(v, class, equal)
			VPADDB(equal, sum, sum)
		}
		VPABSB(sum, sum) // of 8 or fewer times -1
		VPSADBW(zero, sum, sum)
		high := XMM()
		VEXTRACTI128(Imm(1), sum, high)
		VPADDD(sum.AsX(), high, high)
		VPSHUFD(Imm(0b01_00_11_10), high, sum.AsX())
		VPADDD(sum.AsX(), high, high)
		VPEXTRW(Imm(0), high, Mem{Base: counts})
		ADDQ(Imm(countSize), counts)
		VPADDB(one, class, class)
	})
	Label("done")
	VZEROUPPER()
	RET()
}

// minimumByte returns the lowest byte of v.
func minimumByte(v VecVirtual) GPVirtual {
	x := XMM()
	shifted := XMM()
	VEXTRACTI128(Imm(1), v, x)
	VPMINUB(v.AsX(), x, x)
	VPSRLW(Imm(8), x, shifted)
	VPMINUB(shifted, x, x) // the high bytes of words are 0
	VPHMINPOSUW(x, x)
	minimum := GP32()
	VMOVD(x, minimum)
	MOVBLZX(minimum.As8(), minimum)
	return minimum
}

// find counts vector by vector up to the one with the class, and deposits a bit of that vector.
func find() {
	Kernel("findAVX2", "func(chunk *byte, class byte, rank int) (position int)",
		"findAVX2 returns where in a chunk a class occurs after rank other times, which it does.")
	chunk := Load(Param("chunk"), GP64())
	class := GP32()
	Load(Param("class"), class)
	rank := Load(Param("rank"), GP64())
	wanted := YMM()
	x := XMM()
	VMOVD(class, x)
	VPBROADCASTB(x, wanted)
	mask := GP32()
	number := GP32()
	position := GP64()
	XORQ(position, position)
	Label("loop")
	v := YMM()
	VPCMPEQB(Mem{Base: chunk, Index: position, Scale: 1}, wanted, v)
	VPMOVMSKB(v, mask)
	POPCNTL(mask, number)
	CMPQ(rank, number.As64())
	JL(LabelRef("found"))
	SUBQ(number.As64(), rank)
	ADDQ(Imm(32), position)
	CMPQ(position, U32(32*vectors)) // nothing is found, which does not happen
	JL(LabelRef("loop"))
	Label("found")
	bit := GP64()
	MOVQ(U64(1), bit)
	SHLXQ(rank, bit, bit)
	PDEPL(mask, bit.As32(), mask)
	TZCNTL(mask, mask)
	ADDQ(mask.As64(), position)
	VZEROUPPER()
	Store(position, Return("position"))
	RET()
}

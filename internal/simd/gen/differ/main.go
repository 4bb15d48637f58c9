// Command differ writes the AVX2 kernels that list the positions at which two arrays differ, one kernel for each
// element size.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"

	. "github.com/tutti-go/tutti/internal/simd/gen/avx"
)

func main() {
	for _, size := range []int{1, 2, 4, 8} {
		differ(size)
	}
	Generate()
}

const vector = 8 // positions found by one lookup

// differ looks up the positions of differing elements, eight elements at a time, stores eight positions, and advances
// by the number of differences.
func differ(size int) {
	Kernel(fmt.Sprintf("differ%dAVX2", size), "func(list *uint16, old, now *uint64, rounds int) (found int)",
		fmt.Sprintf("differ%dAVX2 lists the elements of %d bytes that differ, in 32 bytes each of at least one round.",
			size, size),
		"It writes up to seven more.")
	list := Load(Param("list"), GP64())
	old := Load(Param("old"), GP64())
	now := Load(Param("now"), GP64())
	rounds := Load(Param("rounds"), GP64())
	table := GP64()
	lowest := GP32()
	cursor := GP64()
	base := XMM()
	LEAQ(Permutations(), table)
	MOVL(U32(0xffff_ffff/(1<<size-1)), lowest)
	MOVQ(list, cursor)
	VPXOR(base, base, base)
	step := Lanes(0x10001 * uint32(min(vector, 32/size))).AsX() // a number in two words
	Repeat(rounds, func() {
		v := YMM()
		differ := GP32()
		VMOVDQU(Mem{Base: old}, v)
		VPCMPEQB(Mem{Base: now}, v, v)
		VPMOVMSKB(v, differ)
		NOTL(differ)
		for shift := 1; shift < size; shift *= 2 { // a byte that differs counts for the lowest byte of its element
			shifted := GP32()
			MOVL(differ, shifted)
			SHRL(Imm(uint64(shift)), shifted)
			ORL(shifted, differ)
		}
		if size > 1 {
			PEXTL(lowest, differ, differ)
		}
		for i := 0; i < 32/size; i += vector {
			part := GP32()
			entry := XMM()
			MOVBLZX(differ.As8(), part)
			VPMOVZXBW(Mem{Base: table, Index: part, Scale: 8}, entry)
			VPADDW(base, entry, entry)
			VMOVDQU(entry, Mem{Base: cursor})
			POPCNTL(part, part)
			LEAQ(Mem{Base: cursor, Index: part, Scale: 2}, cursor)
			VPADDW(step, base, base)
			if i+vector < 32/size {
				SHRL(Imm(vector), differ)
			}
		}
		ADDQ(Imm(32), old)
		ADDQ(Imm(32), now)
	})
	VZEROUPPER()
	SUBQ(list, cursor)
	SHRQ(Imm(1), cursor)
	Store(cursor, Return("found"))
	RET()
}

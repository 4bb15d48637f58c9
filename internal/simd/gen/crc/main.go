// Command crc writes the kernels that compute the change of a CRC from the changes in a block, one kernel for each
// element size.
package main

import (
	"fmt"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"

	. "github.com/tutti-go/tutti/internal/simd/gen/avx"
)

func main() {
	for _, size := range []int{1, 2, 4, 8} {
		change(size)
	}
	Generate()
}

// windowLog is the base-2 logarithm of package crc's windowBytes.
const windowLog = 11

// change sums the products of changes and powers of x without reduction for each window of the block, and reduces the
// sum where the next window begins.
func change(size int) {
	Kernel(fmt.Sprintf("change%dCLMUL", size),
		"func(idx *int32, flips *byte, count int, last int, powers *[2048]uint32, step uint32) (sum uint32)",
		fmt.Sprintf("change%dCLMUL sums what at least one changed element of %d bytes each adds to a CRC-32C.", size, size),
		"The last byte of the block has the offset last.")
	idx := Load(Param("idx"), GP64())
	flips := Load(Param("flips"), GP64())
	count := Load(Param("count"), GP64())
	last := Load(Param("last"), GP64())
	powers := Load(Param("powers"), GP64())
	window := GP64()
	state := GP64()
	pending := XMM()
	step := XMM()
	MOVQ(last, window)
	SARQ(Imm(windowLog), window)
	XORQ(state, state)
	VPXOR(pending, pending, pending)
	r := GP32()
	Load(Param("step"), r)
	VMOVD(r, step)
	Repeat(count, func() {
		distance := GP64()
		target := GP64()
		MOVLQSX(Mem{Base: idx}, distance)
		if size > 1 {
			SHLQ(Imm(uint64(bits.TrailingZeros(uint(size)))), distance)
		}
		NEGQ(distance)
		ADDQ(last, distance)
		MOVQ(distance, target)
		SARQ(Imm(windowLog), target)
		CMPQ(window, target)
		JEQ(LabelRef("same"))
		advance("element", window, target, state, pending, step)
		Label("same")
		ANDQ(U32(1<<windowLog-1), distance)
		for word := 0; word < max(size, 4); word += 4 {
			power := XMM()
			changed := XMM()
			VMOVD(Mem{Base: powers, Index: distance, Scale: 4, Disp: -4 * word}, power)
			element := GP32()
			switch size {
			case 1:
				MOVBLZX(Mem{Base: flips}, element)
			case 2:
				MOVWLZX(Mem{Base: flips}, element)
			default:
				MOVL(Mem{Base: flips, Disp: word}, element)
			}
			VMOVD(element, changed)
			VPCLMULQDQ(Imm(0), changed, power, power)
			VPXOR(power, pending, pending)
		}
		ADDQ(Imm(4), idx)
		ADDQ(Imm(uint64(size)), flips)
	})
	end := GP64()
	XORQ(end, end)
	advance("end", window, end, state, pending, step)
	Store(state.As32(), Return("sum"))
	RET()
}

// advance adds the pending sum to the state, and multiplies the state for each window up to the target.
func advance(name string, window, target, state Register, pending, step VecVirtual) {
	sum := GP64()
	zero := GP64()
	XORQ(zero, zero)
	VMOVQ(pending, sum)
	CRC32Q(sum, zero)
	XORQ(zero, state)
	VPXOR(pending, pending, pending)
	floor := GP64() // of a target, for elements at the block's distance, which do not count
	XORQ(floor, floor)
	CMPQ(target, floor)
	CMOVQLT(floor, target)
	Label(name + "Window")
	CMPQ(window, target)
	JLE(LabelRef(name + "Done"))
	product := XMM()
	VMOVQ(state, product)
	VPCLMULQDQ(Imm(0), step, product, product)
	VMOVQ(product, sum)
	XORQ(state, state)
	CRC32Q(sum, state)
	DECQ(window)
	JMP(LabelRef(name + "Window"))
	Label(name + "Done")
}

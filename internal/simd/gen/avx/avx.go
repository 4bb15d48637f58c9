// Package avx holds the common parts of the generators of AVX2 kernels.
package avx

import (
	"sync"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/gotypes"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Kernel starts a function. Its slices do not escape, because it keeps no pointer.
func Kernel(name, signature string, doc ...string) {
	TEXT(name, NOSPLIT, signature)
	Pragma("noescape")
	Doc(doc...)
}

// Address returns the address of a parameter, or of a part of one.
func Address(c gotypes.Component) Mem {
	m, err := c.Resolve()
	if err != nil {
		panic(err)
	}
	return m.Addr
}

// Zero returns a vector of zeros.
func Zero() VecVirtual {
	v := YMM()
	VPXOR(v, v, v)
	return v
}

// Broadcast returns a vector with the 32 bits of r in all lanes.
func Broadcast(r Register) VecVirtual {
	x := XMM()
	v := YMM()
	VMOVD(r, x)
	VPBROADCASTD(x, v)
	return v
}

// Lanes returns a vector with the 32 bits of v in all lanes.
func Lanes(v uint32) VecVirtual {
	r := GP32()
	MOVL(U32(v), r)
	return Broadcast(r)
}

// Fold combines the eight lanes of v into the first one of a register.
func Fold(v VecVirtual, combine func(ops ...Op)) VecVirtual {
	low := XMM()
	high := XMM()
	VEXTRACTI128(Imm(1), v, high)
	combine(v.AsX(), high, low)
	for _, order := range []uint8{0b01_00_11_10, 0b00_00_00_01} {
		VPSHUFD(U8(order), low, high)
		combine(low, high, low)
	}
	return low
}

// Repeat writes a loop of left rounds, at least one.
func Repeat(left Register, body func()) {
	Label("loop")
	body()
	DECQ(left)
	JNZ(LabelRef("loop"))
}

// Table returns a constant in memory. The name must stand for its words.
func Table(name string, words ...uint32) Mem {
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

var tables = map[string]Mem{}

// Permutations returns a table of eight bytes for each mask of eight bits: the positions of the set bits in ascending
// order.
var Permutations = sync.OnceValue(func() Mem {
	table := GLOBL("permutations", RODATA|NOPTR)
	for mask := range 256 {
		var entry uint64
		n := 0
		for bit := range 8 {
			if mask>>bit&1 == 1 {
				entry |= uint64(bit) << (8 * n)
				n++
			}
		}
		DATA(mask*8, U64(entry))
	}
	return table
})

const block = 64 // elements

// Blocks writes the end of a kernel that handles blocks of 64 elements of the slice with the given name. body gets
// the block's address and may jump to the end. Each turn advances the addresses in steps by their numbers of bytes.
// Blocks returns the number of blocks.
func Blocks(slice string, body func(x Register), steps ...Step) {
	x := Load(Param(slice).Base(), GP64())
	left := Load(Param(slice).Len(), GP64())
	done := GP64()
	SHRQ(Imm(6), left)
	XORQ(done, done)
	Label("block")
	CMPQ(done, left)
	JGE(LabelRef("end"))
	body(x)
	for _, s := range append(steps, Step{x, 4 * block}) {
		ADDQ(U32(uint32(s.Bytes)), s.Index)
	}
	INCQ(done)
	JMP(LabelRef("block"))
	Label("end")
	VZEROUPPER()
	Store(done, ReturnIndex(0))
	RET()
}

// Step is the number of bytes by which a turn advances an address.
type Step struct {
	Index Register
	Bytes int
}

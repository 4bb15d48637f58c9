package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/tutti-go/tutti/internal/simd/gen/avx"
)

const (
	ymmBytes  = 32 // width of an AVX2 register
	cacheLine = 64 // on every amd64 processor
)

// sized returns the part of the register that computes vectors of w bytes: all of it, or the lower half.
func sized(w int, v reg.VecVirtual) reg.VecVirtual {
	if w == ymmBytes {
		return v.AsY().(reg.VecVirtual)
	}
	return v.AsX().(reg.VecVirtual)
}

// loadVector reads w bytes, a power of two, into a new register. The bytes above are zero.
func loadVector(w int, from Mem) reg.VecVirtual {
	v := sized(w, YMM())
	switch w {
	case 32, 16:
		VMOVDQU(from, v)
	case 8:
		VMOVQ(from, v)
	case 4:
		VMOVD(from, v)
	case 2:
		VPXOR(v, v, v)
		VPINSRW(Imm(0), from, v, v)
	case 1:
		VPXOR(v, v, v)
		VPINSRB(Imm(0), from, v, v)
	}
	return v
}

// storeVector writes the lower w bytes of a register.
func storeVector(w int, v reg.VecVirtual, to Mem) {
	switch w {
	case 32:
		VMOVDQU(v.AsY(), to)
	case 16:
		VMOVDQU(v.AsX(), to)
	case 8:
		VMOVQ(v.AsX(), to)
	case 4:
		VMOVD(v.AsX(), to)
	case 2:
		VPEXTRW(Imm(0), v.AsX(), to)
	case 1:
		VPEXTRB(Imm(0), v.AsX(), to)
	}
}

// storeStream writes a whole register to an aligned address and bypasses the caches.
func storeStream(w int, v reg.VecVirtual, to Mem) {
	VMOVNTDQ(sized(w, v), to)
}

// broadcast64 returns a register with value in every 64-bit lane.
func broadcast64(value uint64) reg.VecVirtual {
	bits := GP64()
	v := YMM()
	MOVQ(U64(value), bits)
	VMOVQ(bits, v.AsX())
	VPBROADCASTQ(v.AsX(), v)
	return v
}

// constant32 returns the address of a constant as wide as a register, with value in every 32-bit lane. It is for
// kernels that need more constants than there are registers.
func constant32(value uint32) Mem {
	return avx.Table(fmt.Sprintf("lanes%08x", value), value, value, value, value, value, value, value, value)
}

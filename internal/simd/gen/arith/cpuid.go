package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// cpuid writes the function that reads the processor's feature bits.
func cpuid() {
	TEXT("cpuid1ecx", nosplit, "func() uint32")
	Doc("cpuid1ecx returns register ECX of CPUID leaf 1, which has feature bits.")
	MOVL(U32(1), reg.EAX)
	XORL(reg.ECX, reg.ECX)
	CPUID()
	Store(reg.ECX, ReturnIndex(0))
	RET()
}

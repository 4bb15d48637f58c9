//go:build linux || darwin

#include "textflag.h"

// CALL_FRAME calls frame.fn with frame.args, given the frame's address in R11: six
// arguments in registers, ten where SP points to, none of them floating-point.
#define CALL_FRAME \
	MOVQ  56(R11), AX; MOVQ AX, 0(SP); \
	MOVQ  64(R11), AX; MOVQ AX, 8(SP); \
	MOVQ  72(R11), AX; MOVQ AX, 16(SP); \
	MOVQ  80(R11), AX; MOVQ AX, 24(SP); \
	MOVQ  88(R11), AX; MOVQ AX, 32(SP); \
	MOVQ  96(R11), AX; MOVQ AX, 40(SP); \
	MOVQ  104(R11), AX; MOVQ AX, 48(SP); \
	MOVQ  112(R11), AX; MOVQ AX, 56(SP); \
	MOVQ  120(R11), AX; MOVQ AX, 64(SP); \
	MOVQ  128(R11), AX; MOVQ AX, 72(SP); \
	MOVQ  0(R11), R10; \
	MOVQ  8(R11), DI; \
	MOVQ  16(R11), SI; \
	MOVQ  24(R11), DX; \
	MOVQ  32(R11), CX; \
	MOVQ  40(R11), R8; \
	MOVQ  48(R11), R9; \
	XORL  AX, AX; \
	CALL  R10

// enterC is called by the runtime on the system's stack, as a C function
// (System V AMD64 ABI) with the address of a frame in DI. It calls frame.fn
// with frame.args and returns what that returns. The frame is not touched after
// the call: it may lie on a Go stack, which can move while C calls back.
TEXT ·enterC(SB), NOSPLIT|NOFRAME, $0-0
	PUSHQ BP
	MOVQ  SP, BP
	SUBQ  $80, SP          // arguments 7 to 16; SP stays a multiple of 16
	MOVQ  DI, R11
	CALL_FRAME
	MOVQ  BP, SP
	POPQ  BP
	RET

// enterCAddress holds the address of enterC itself; a func value in Go would
// be that of a wrapper.
DATA ·enterCAddress(SB)/8, $·enterC(SB)
GLOBL ·enterCAddress(SB), NOPTR|RODATA, $8

// enterEach is called like enterC, with the address of a Sequence. It makes the
// calls one after the other; that each takes 152 bytes and where things are in
// them is what the type says.
TEXT ·enterEach(SB), NOSPLIT|NOFRAME, $0-0
	PUSHQ BP
	MOVQ  SP, BP
	PUSHQ BX
	PUSHQ R12
	SUBQ  $80, SP          // arguments 7 to 16; SP stays a multiple of 16
	MOVQ  DI, BX
	LEAQ  8(DI), R12       // the call that is next

again:
	XORL  AX, AX
	CMPQ  0(BX), $0        // left
	JEQ   end
	MOVQ  R12, R11
	CALL_FRAME
	TESTL AX, AX
	JNE   end
	MOVQ  136(R12), CX     // flag
	TESTQ CX, CX
	JEQ   next
	CMPL  0(CX), $0
	JNE   next
	DECQ  144(R12)         // times
	JNE   again

next:
	ADDQ $152, R12
	DECQ 0(BX)
	JMP  again

end:
	LEAQ -16(BP), SP
	POPQ R12
	POPQ BX
	POPQ BP
	RET

DATA ·enterEachAddress(SB)/8, $·enterEach(SB)
GLOBL ·enterEachAddress(SB), NOPTR|RODATA, $8

#include "textflag.h"

// func fill(s *Stack) (n int, goroutine uintptr)
//
// BP points to the saved BP of the caller, the return address above it. g begins
// with the bounds of the stack, lo and hi.
TEXT ·fill(SB), NOSPLIT, $0-24
	MOVQ s+0(FP), DI
	MOVQ TLS, CX
	MOVQ 0(CX)(TLS*1), CX
	MOVQ CX, goroutine+16(FP)
	MOVQ 0(CX), R8
	MOVQ 8(CX), R9
	SUBQ $16, R9
	MOVQ BP, BX
	XORQ AX, AX

next:
	CMPQ BX, R8
	JB   done
	CMPQ BX, R9
	JHI  done
	MOVQ 8(BX), DX
	TESTQ DX, DX
	JZ   done
	MOVQ DX, (DI)(AX*8)
	INCQ AX
	CMPQ AX, $32
	JEQ  done
	MOVQ BX, R8             // outer frames are above
	ADDQ $16, R8
	MOVQ (BX), BX
	JMP  next

done:
	MOVQ AX, n+8(FP)
	RET

#include "textflag.h"

// func fill(s *Stack) (n int, goroutine uintptr)
//
// R29 points to the saved R29 of the caller, the return address above it. g
// begins with the bounds of the stack, lo and hi.
TEXT ·fill(SB), NOSPLIT, $0-24
	MOVD s+0(FP), R0
	MOVD g, goroutine+16(FP)
	MOVD 0(g), R1
	MOVD 8(g), R2
	SUB  $16, R2
	MOVD R29, R3
	MOVD ZR, R4

next:
	CMP  R1, R3
	BLO  done
	CMP  R2, R3
	BHI  done
	MOVD 8(R3), R5
	CBZ  R5, done
	MOVD.P R5, 8(R0)
	ADD  $1, R4
	CMP  $32, R4
	BEQ  done
	ADD  $16, R3, R1             // outer frames are above
	MOVD (R3), R3
	B    next

done:
	MOVD R4, n+8(FP)
	RET

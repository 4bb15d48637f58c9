//go:build !windows

#include "textflag.h"

// func now() Ticks
TEXT ·now(SB), NOSPLIT, $0-8
	RDTSC
	SHLQ $32, DX
	ORQ  DX, AX
	MOVQ AX, ret+0(FP)
	RET

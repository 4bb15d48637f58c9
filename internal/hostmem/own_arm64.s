#include "textflag.h"

// func Own(address uintptr)
TEXT ·Own(SB), NOSPLIT, $0-8
	MOVD address+0(FP), R0
	PRFM (R0), PSTL1KEEP
	RET

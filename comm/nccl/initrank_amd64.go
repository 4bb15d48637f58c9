package nccl

import (
	"encoding/binary"

	"github.com/tutti-go/tutti/internal/dl"
)

// callInitRank calls
//
//	ncclCommInitRankConfig(ncclComm_t*, int nranks, ncclUniqueId, int rank, ncclConfig_t*)
//
// The System V ABI passes a structure of 128 bytes by value on the stack, as
// sixteen words, while the other four arguments take the first four of six
// registers: two registers are filled up so that the words come to the stack.
func callInitRank(fn dl.Func, handle uintptr, size int, id *uniqueID, rank int, cfg uintptr) uintptr {
	args := [6 + 16]uintptr{handle, uintptr(size), uintptr(rank), cfg}
	for i := range 16 {
		args[6+i] = uintptr(binary.LittleEndian.Uint64(id[8*i:]))
	}
	return fn.Call(args[:]...)
}

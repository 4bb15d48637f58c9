package nccl

import (
	"encoding/binary"

	"github.com/tutti-go/tutti/internal/dl"
)

// callInitRank calls
//
//	ncclCommInitRankConfig(ncclComm_t*, int nranks, ncclUniqueId, int rank, ncclConfig_t*)
//
// The System V ABI passes a 128-byte structure by value on the stack, as sixteen words. The other four arguments take
// the first four of six registers; two padding arguments fill the other registers, so that the words go to the stack.
func callInitRank(fn dl.Func, handle uintptr, size int, id *uniqueID, rank int, cfg uintptr) uintptr {
	args := [6 + 16]uintptr{handle, uintptr(size), uintptr(rank), cfg}
	for i := range 16 {
		args[6+i] = uintptr(binary.LittleEndian.Uint64(id[8*i:]))
	}
	return fn.Call(args[:]...)
}

package nccl

import (
	"runtime"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// callInitRank calls
//
//	ncclCommInitRankConfig(ncclComm_t*, int nranks, ncclUniqueId, int rank, ncclConfig_t*)
//
// AAPCS64 passes a structure larger than sixteen bytes by the address of a
// copy.
func callInitRank(fn dl.Func, handle uintptr, size int, id *uniqueID, rank int, cfg uintptr) uintptr {
	id2 := new(uniqueID)
	*id2 = *id
	result := fn.Call(handle, uintptr(size), hostmem.Addr(id2[:]), uintptr(rank), cfg)
	runtime.KeepAlive(id2)
	return result
}

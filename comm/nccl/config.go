package nccl

import (
	"math"
	"unsafe"
)

// config is ncclConfig_t as of NCCL 2.18. The library reads only as much as the size and version fields declare, so
// newer versions accept it.
type config struct {
	size       uintptr // bytes of this structure
	magic      uint32  // configMagic
	version    uint32  // NCCL_VERSION_CODE of the structure
	blocking   int32   // 1: calls return when they are complete; 0: GetAsyncError tells
	cgaCluster int32   // undefined: NCCL's choice
	minCTAs    int32   // thread blocks; undefined: NCCL's choice
	maxCTAs    int32   // the same
	_          uintptr // netName: not set
	splitShare int32   // undefined: NCCL's choice
	_          int32   // padding
}

// The initial values of ncclConfig_t: the magic number of its initializer, and "not set".
const (
	configMagic = 0xcafebeef
	undefined   = math.MinInt32
)

// config makes NCCL's configuration, on the heap, so that its address may be passed on.
func (o options) config(blocking bool) *config {
	mode := int32(0)
	if blocking {
		mode = 1
	}
	bound := func(n int) int32 {
		if n <= 0 {
			return undefined
		}
		return int32(n)
	}
	return &config{
		size:       unsafe.Sizeof(config{}),
		magic:      configMagic,
		version:    oldest,
		blocking:   mode,
		cgaCluster: undefined,
		minCTAs:    bound(o.minCTAs),
		maxCTAs:    bound(o.maxCTAs),
		splitShare: undefined,
	}
}

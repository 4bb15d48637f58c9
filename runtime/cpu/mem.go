package cpu

import "github.com/tutti-go/tutti/internal/pool"

// hostMemory is the pool's source: anonymous memory of the operating system.
type hostMemory struct{}

// slabBytes is the size of the mappings that blocks up to 256 KiB are cut from.
const slabBytes = pool.Granule

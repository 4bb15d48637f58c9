package cpu

import "github.com/tutti-go/tutti/runtime/internal/pool"

// hostMemory is the pool's source: anonymous memory of the operating system.
type hostMemory struct{}

// Fence implements [pool.System]: no work is ever in flight.
func (hostMemory) Fence() (wait func() error) {
	return func() error { return nil }
}

// slabBytes is the size of the mappings that blocks up to 256 KiB are cut from.
const slabBytes = pool.Granule

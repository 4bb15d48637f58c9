//go:build unix

package cpu

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/internal/pool"
)

// Map implements [pool.System] with zeroed, private memory. The kernel aligns
// only to pages, so it is asked for one granule more than needed and gets the
// ends back.
func (hostMemory) Map(bytes int) (pool.Mapping, error) {
	start, err := unix.MmapPtr(-1, 0, nil, uintptr(bytes+pool.Granule),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return pool.Mapping{}, err
	}
	base := uintptr(start)
	addr := (base + pool.Granule - 1) &^ (pool.Granule - 1)
	end := addr + uintptr(bytes)
	last := base + uintptr(bytes) + pool.Granule
	for _, slack := range [][2]uintptr{{base, addr}, {end, last}} {
		if slack[0] == slack[1] {
			continue
		}
		if err := unmap(slack[0], slack[1]-slack[0]); err != nil {
			return pool.Mapping{}, err
		}
	}
	adviseHugePages(addr, bytes)
	return pool.Mapping{Addr: addr, Bytes: bytes}, nil
}

// Unmap implements [pool.System].
func (hostMemory) Unmap(m pool.Mapping) error {
	return unmap(m.Addr, uintptr(m.Bytes))
}

func unmap(addr, bytes uintptr) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(hostmem.Slice[byte](addr, 1))), bytes)
}

package cpu

import (
	"golang.org/x/sys/windows"

	"github.com/tutti-go/tutti/runtime/internal/pool"
)

// Map implements [pool.System] with zeroed, private memory: address space for
// one granule more is reserved, and the aligned part committed.
func (h hostMemory) Map(bytes int) (pool.Mapping, error) {
	base, err := windows.VirtualAlloc(0, uintptr(bytes+pool.Granule), windows.MEM_RESERVE, windows.PAGE_READWRITE)
	if err != nil {
		return pool.Mapping{}, err
	}
	m := pool.Mapping{
		Addr:   (base + pool.Granule - 1) &^ (pool.Granule - 1),
		Handle: base,
		Bytes:  bytes,
	}
	if _, err := windows.VirtualAlloc(m.Addr, uintptr(bytes), windows.MEM_COMMIT, windows.PAGE_READWRITE); err != nil {
		_ = h.Unmap(m)
		return pool.Mapping{}, err
	}
	return m, nil
}

// Unmap implements [pool.System].
func (hostMemory) Unmap(m pool.Mapping) error {
	return windows.VirtualFree(m.Handle, 0, windows.MEM_RELEASE)
}

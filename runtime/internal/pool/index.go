package pool

import "sync/atomic"

// The index covers the 48 bits of address space that programs have on amd64 and arm64, granule by granule, in a
// two-level table.
const (
	addressBits = 48
	leafBits    = 14
	rootBits    = addressBits - granuleBits - leafBits
)

// index finds the region an address belongs to without a lock.
type index struct {
	root [1 << rootBits]atomic.Pointer[leaf] // tables of granules; nil without regions
}

type leaf [1 << leafBits]atomic.Pointer[region]

// find returns the region registered for the granule of ptr, or nil.
func (x *index) find(ptr uintptr) *region {
	if ptr>>addressBits != 0 {
		return nil
	}
	l := x.root[ptr>>(granuleBits+leafBits)].Load()
	if l == nil {
		return nil
	}
	return l[ptr>>granuleBits&(1<<leafBits-1)].Load()
}

// set registers r (nil: nothing) for the granules of this number of bytes from ptr on.
func (x *index) set(ptr uintptr, bytes int, r *region) {
	for end := ptr + uintptr(bytes); ptr < end; ptr += Granule {
		entry := &x.root[ptr>>(granuleBits+leafBits)]
		if entry.Load() == nil {
			entry.CompareAndSwap(nil, new(leaf))
		}
		entry.Load()[ptr>>granuleBits&(1<<leafBits-1)].Store(r)
	}
}

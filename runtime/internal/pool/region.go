package pool

import (
	"fmt"

	"github.com/tutti-go/tutti/runtime"
)

// region is a mapping cut into blocks of equal size (a slab), or serving as one block (a large block). Its metadata is
// stored apart from the blocks, so a program that writes out of bounds or after free cannot corrupt the pool.
//
// All fields but the constant ones are guarded by the lock of the owner.
type region struct {
	Mapping
	start  uintptr  // address of the first block, constant
	block  int      // bytes per block, constant
	blocks int      // number of blocks, constant
	slab   *class   // owner; nil for a large block, constant
	carved int      // leading blocks that have been allocated at least once
	free   []uint32 // the freed ones of these; the last is reused first
	live   []uint64 // one bit per block: allocated now
	uses   uint64   // number of allocations
	gone   bool     // returned to the system
}

// newRegion cuts a mapping into blocks, beginning at offset. A mapping without an owner is one block.
func newRegion(m Mapping, offset, block int, owner *class) *region {
	blocks := 1
	if owner != nil {
		blocks = m.Bytes / block
	}
	return &region{
		Mapping: m,
		start:   m.Addr + uintptr(offset),
		block:   block,
		blocks:  blocks,
		slab:    owner,
		free:    make([]uint32, 0, blocks),
		live:    make([]uint64, (blocks+63)/64),
	}
}

func (r *region) isGone() bool { return r.gone }
func (r *region) full() bool {
	return r.carved == r.blocks && len(r.free) == 0
}
func (r *region) liveCount() int {
	return r.carved - len(r.free)
}

// indexed returns the number of bytes of the mapping in the index: all of a slab, but only the first granule of a
// large block, because Allocate returns no other address in it.
func (r *region) indexed() int {
	if r.slab != nil {
		return r.Bytes
	}
	return 1
}

// take allocates a block; the region must not be full.
func (r *region) take() uintptr {
	i := r.carved
	if last := len(r.free) - 1; last >= 0 {
		i = int(r.free[last])
		r.free = r.free[:last]
	} else {
		r.carved++
	}
	r.live[i/64] |= 1 << (i % 64)
	r.uses++
	return r.start + uintptr(i*r.block)
}

// give frees a block, if ptr is the address of an allocated one.
func (r *region) give(ptr uintptr) error {
	offset := ptr - r.start // huge if ptr is below start
	i := offset / uintptr(r.block)
	inside := offset % uintptr(r.block)
	switch {
	case r.gone || i >= uintptr(r.carved):
		return errForeign(ptr)
	case inside != 0:
		return fmt.Errorf("%#x lies %d bytes inside a block: %w", ptr, inside, runtime.ErrForeignPointer)
	case r.live[i/64]&(1<<(i%64)) == 0:
		return fmt.Errorf("%#x: %w", ptr, runtime.ErrDoubleFree)
	}
	r.live[i/64] &^= 1 << (i % 64)
	r.free = append(r.free, uint32(i))
	return nil
}

func errForeign(ptr uintptr) error {
	return fmt.Errorf("%#x: %w", ptr, runtime.ErrForeignPointer)
}

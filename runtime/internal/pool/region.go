package pool

import (
	"fmt"

	"github.com/tutti-go/tutti/runtime"
)

// region is a mapping cut into blocks of equal size (a slab), or serving as one
// block (a large block). Its bookkeeping lives apart from the blocks, so a
// program that writes out of bounds or after free cannot corrupt the pool.
//
// All fields but the constant ones are guarded by the lock of the owner.
type region struct {
	Mapping
	start  uintptr  // address of the first block, constant
	block  int      // bytes per block, constant
	blocks int      // number of blocks, constant
	slab   *class   // owner; nil for a large block, constant
	carved int      // blocks handed out at least once: the first ones
	free   []uint32 // of these, the freed ones; the last is reused first
	live   []uint64 // one bit per block: handed out now
	uses   uint64   // how often a block was handed out
	gone   bool     // returned to the system
}

// newRegion cuts a mapping into blocks, from offset on. A mapping without an
// owner is one block.
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

// indexed is how many bytes of the mapping the index knows: all of a slab, but
// only the first granule of a large block, because every other address in it
// is interior, so not one that Allocate returned.
func (r *region) indexed() int {
	if r.slab != nil {
		return r.Bytes
	}
	return 1
}

// take hands out a block; the region must not be full.
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

// give takes a block back, if ptr is one that is handed out.
func (r *region) give(ptr uintptr) error {
	offset := ptr - r.start // huge if ptr lies before
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

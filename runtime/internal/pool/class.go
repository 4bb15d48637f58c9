package pool

import (
	"iter"
	"slices"
	"sync"
)

// counters are the counts of a class or of the large blocks, under their lock.
type counters struct {
	allocations int64 // of blocks
	hits        int64 // allocations that a free block served
	cachedBytes int64 // of free blocks
	liveBlocks  int64 // that were not freed
}

func (n *counters) took(size int, hit, reused bool) {
	n.allocations++
	n.liveBlocks++
	if hit {
		n.hits++
	}
	if reused {
		n.cachedBytes -= int64(size)
	}
}

func (n *counters) gave(size int) {
	n.liveBlocks--
	n.cachedBytes += int64(size)
}

// lost removes a region that returns to the system from the counts.
func (n *counters) lost(r *region) {
	n.cachedBytes -= int64(len(r.free) * r.block)
	n.liveBlocks -= int64(r.liveCount())
}

func (n *counters) counts() *counters { return n }

// owner is a class or the large blocks. All methods but Lock need its lock.
type owner interface {
	sync.Locker
	counts() *counters
	// regions are all of the owner's.
	regions() iter.Seq[*region]
	// forgetGone drops the regions that are marked as gone.
	forgetGone()
}

// remove removes the regions of an owner that are to return to the system, and marks them.
func remove(o owner, which func(*region) bool) (removed []*region) {
	for r := range o.regions() {
		if which(r) {
			r.gone = true
			o.counts().lost(r)
			removed = append(removed, r)
		}
	}
	o.forgetGone()
	return removed
}

// class holds the slabs whose blocks have one size.
type class struct {
	sync.Mutex
	counters
	size  int       // of a block, in bytes
	slabs []*region // all of them
	open  []*region // those with room; the last is used first
}

// take allocates a block if a slab has one. hit says whether the system was not needed.
func (c *class) take(hit bool) (ptr uintptr, ok bool) {
	if len(c.open) == 0 {
		return 0, false
	}
	r := c.open[len(c.open)-1]
	reused := len(r.free) > 0
	ptr = r.take()
	if r.full() {
		c.open = c.open[:len(c.open)-1]
	}
	c.took(c.size, hit, reused)
	return ptr, true
}

// give frees a block of the slab r.
func (c *class) give(r *region, ptr uintptr) error {
	wasFull := r.full()
	if err := r.give(ptr); err != nil {
		return err
	}
	if wasFull {
		c.open = append(c.open, r)
	}
	c.gave(c.size)
	return nil
}

// add makes a new slab available.
func (c *class) add(m Mapping) *region {
	r := newRegion(m, 0, c.size, c)
	c.slabs = append(c.slabs, r)
	c.open = append(c.open, r)
	return r
}

func (c *class) regions() iter.Seq[*region] {
	return slices.Values(c.slabs)
}

func (c *class) forgetGone() {
	c.slabs = slices.DeleteFunc(c.slabs, (*region).isGone)
	c.open = slices.DeleteFunc(c.open, (*region).isGone)
}

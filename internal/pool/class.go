package pool

import (
	"slices"
	"sync"
)

// counters are what a class or the large blocks count under their lock.
type counters struct {
	allocations int64
	hits        int64
	cachedBytes int64
	liveBlocks  int64
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

// class holds the slabs whose blocks have one size.
type class struct {
	mu sync.Mutex
	counters
	size  int
	slabs []*region // all of them
	open  []*region // those with room; the last is used first
}

// take hands out a block if a slab has one. hit says whether the caller got by
// without the system.
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

// give takes back a block of the slab r.
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

// removeUnused takes out the slabs without live blocks, all slabs if force.
func (c *class) removeUnused(force bool) (unused []*region) {
	gone := func(r *region) bool { return r.gone }
	for _, r := range c.slabs {
		if force || r.liveCount() == 0 {
			r.gone = true
			c.cachedBytes -= int64(len(r.free) * r.block)
			c.liveBlocks -= int64(r.liveCount())
			unused = append(unused, r)
		}
	}
	c.slabs = slices.DeleteFunc(c.slabs, gone)
	c.open = slices.DeleteFunc(c.open, gone)
	return unused
}

package pool

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"sync"
)

// large holds the blocks that are separate mappings.
type large struct {
	sync.Mutex
	counters
	blocks map[*region]struct{} // all of them; guarded by the mutex
	cached []*region            // free blocks, by size, then by address; guarded by the mutex
	colors int                  // number of blocks that have a color; guarded by the mutex
}

// colorStep is the distance of the colors of large blocks: an odd number of cache lines, so that they fall into
// different sets of a cache.
const colorStep = 5 * alignment

// take allocates the smallest cached block with at least size and at most limit bytes.
func (l *large) take(size, limit int) (r *region, ok bool) {
	i, _ := slices.BinarySearchFunc(l.cached, size, func(r *region, size int) int {
		return r.block - size
	})
	if i == len(l.cached) || l.cached[i].block > limit {
		return nil, false
	}
	r = l.cached[i]
	l.cached = slices.Delete(l.cached, i, i+1)
	r.take()
	l.took(r.block, true, true)
	return r, true
}

// add registers a new block of size bytes with the next color, and allocates it.
func (l *large) add(m Mapping, size, colors int) *region {
	r := newRegion(m, l.colors%colors*colorStep, size, nil)
	l.colors++
	l.blocks[r] = struct{}{}
	r.take()
	l.took(r.block, false, false)
	return r
}

// give frees a block, into the cache if it may be reused.
func (l *large) give(r *region, ptr uintptr, reuse bool) error {
	if err := r.give(ptr); err != nil {
		return err
	}
	l.gave(r.block)
	if !reuse {
		return nil
	}
	i, _ := slices.BinarySearchFunc(l.cached, r, func(a, b *region) int {
		if a.block != b.block {
			return cmp.Compare(a.block, b.block)
		}
		return cmp.Compare(a.start, b.start)
	})
	l.cached = slices.Insert(l.cached, i, r)
	return nil
}

func (l *large) regions() iter.Seq[*region] {
	return maps.Keys(l.blocks)
}

func (l *large) forgetGone() {
	maps.DeleteFunc(l.blocks, func(r *region, _ struct{}) bool { return r.gone })
	l.cached = slices.DeleteFunc(l.cached, (*region).isGone)
}

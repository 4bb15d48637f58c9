// Package pool is the allocator behind every runtime: it hands out blocks of
// whatever memory a [System] maps, keeps what is given back, counts, and
// notices double frees and foreign pointers. It never touches the memory
// itself, so it serves device memory as well as the host's.
package pool

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/runtime"
)

// System is where memory comes from. Its methods may be called from several
// goroutines at once.
type System interface {
	// Map returns memory of that many bytes that starts at a multiple of
	// [Granule].
	Map(bytes int) (Mapping, error)
	// Unmap gives it back.
	Unmap(Mapping) error
}

// Mapping is a piece of memory from the system.
type Mapping struct {
	Addr   uintptr // first usable address, a multiple of Granule below 2^48
	Handle uintptr // what the system calls it by
	Bytes  int     // usable bytes
}

// Config says how a pool cuts and keeps memory.
type Config struct {
	// Name begins the pool's error messages.
	Name string
	// System is where memory comes from.
	System System
	// SlabBytes is the size of a mapping that is cut into blocks of one size
	// class, a multiple of Granule. Blocks above an eighth of it are mappings
	// of their own.
	SlabBytes int
	// PageBytes is what sizes of such mappings are rounded up to, at most
	// Granule.
	PageBytes int
	// Colors is at how many different offsets such blocks start in their
	// mappings, in turn; at most 64, and 0 is the same as 1. Mappings start at
	// equal offsets in a page, so equal positions in several large blocks would
	// fall into the same set of a processor's cache and push each other out
	// where they are read together, as a reduction does.
	Colors int
	// CacheLimit bounds the bytes kept for reuse in mappings of one block;
	// negative: no bound.
	CacheLimit int64
}

// Pool is safe for concurrent use.
//
// Small sizes are cut from slabs, one lock per size class; large ones are
// mappings of their own. No such lock is held while the system is asked for
// memory.
type Pool struct {
	config       Config
	largestClass int // the largest block cut from a slab
	colorRoom    int // how much longer than its block a mapping must be

	classes []class
	large   large
	index   index

	live, peak atomic.Int64
	frozen     atomic.Int32 // how often Freeze was called without Unfreeze
	closed     atomic.Bool

	// exchange is held for reading while memory moves from or to the system:
	// Freeze and Close wait for that to end. It is locked before any other.
	exchange sync.RWMutex
}

// New returns an empty pool. It asks the system for memory only when Allocate
// needs some.
func New(c Config) *Pool {
	c.Colors = max(c.Colors, 1)
	p := &Pool{config: c, largestClass: c.SlabBytes / 8, colorRoom: (c.Colors - 1) * colorStep}
	p.large.blocks = make(map[*region]struct{})
	last, _ := roundSize(p.largestClass)
	p.classes = make([]class, last+1)
	for size := 1; size <= p.largestClass; {
		i, rounded := roundSize(size)
		p.classes[i].size = rounded
		size = rounded + 1
	}
	return p
}

// Allocate returns a block of at least that many bytes, address 0 for none.
func (p *Pool) Allocate(bytes int) (ptr uintptr, err error) {
	var size int
	switch {
	case bytes < 0:
		return 0, fmt.Errorf("%s: allocate %d bytes: %w", p.config.Name, bytes, runtime.ErrArgument)
	case bytes > math.MaxInt-2*Granule-bytes/8:
		return 0, fmt.Errorf("%s: allocate %d bytes: %w", p.config.Name, bytes, runtime.ErrOutOfMemory)
	case bytes == 0:
		if p.closed.Load() {
			err = p.errClosed("allocate")
		}
		return 0, err
	case bytes <= p.largestClass:
		ptr, size, err = p.allocateSmall(bytes)
	default:
		_, size = roundSize(bytes)
		size = p.roundToPages(size)
		limit := max(size, bytes+bytes/8)
		if p.frozen.Load() > 0 {
			limit = math.MaxInt // any block that fits is better than none
		}
		ptr, size, err = p.allocateLarge(bytes, size, limit)
	}
	if err != nil {
		return 0, err
	}
	p.countLive(size)
	return ptr, nil
}

// AllocateMapping returns a block that shares its mapping with no other, of
// exactly bytes rounded up to pages, however few these are: for libraries that
// map the memory of one device into others, which goes by whole mappings and,
// where the devices have to agree, by their exact size.
func (p *Pool) AllocateMapping(bytes int) (uintptr, error) {
	if bytes <= 0 || bytes > math.MaxInt-2*Granule {
		return p.Allocate(bytes) // nothing, or an error
	}
	size := p.roundToPages(bytes)
	ptr, size, err := p.allocateLarge(size, size, size)
	if err != nil {
		return 0, err
	}
	p.countLive(size)
	return ptr, nil
}

// countLive counts a block that is handed out.
func (p *Pool) countLive(size int) {
	live := p.live.Add(int64(size))
	for peak := p.peak.Load(); live > peak && !p.peak.CompareAndSwap(peak, live); {
		peak = p.peak.Load()
	}
}

func (p *Pool) allocateSmall(bytes int) (ptr uintptr, size int, err error) {
	i, _ := roundSize(bytes)
	c := &p.classes[i]

	c.mu.Lock()
	ptr, ok := c.take(true)
	c.mu.Unlock()
	if ok {
		return ptr, c.size, nil
	}
	p.exchange.RLock()
	defer p.exchange.RUnlock()
	m, err := p.mapNew(bytes, p.config.SlabBytes)
	if err != nil {
		return 0, 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p.register(c.add(m))
	ptr, _ = c.take(false)
	return ptr, c.size, nil
}

// allocateLarge hands out a cached block of at least bytes and at most limit
// bytes, or else a new one of size bytes.
func (p *Pool) allocateLarge(bytes, size, limit int) (ptr uintptr, got int, err error) {
	l := &p.large

	l.mu.Lock()
	r, ok := l.take(bytes, limit)
	l.mu.Unlock()
	if ok {
		return r.start, r.block, nil
	}
	p.exchange.RLock()
	defer p.exchange.RUnlock()
	m, err := p.mapNew(bytes, size+p.roundToPages(p.colorRoom))
	if err != nil {
		return 0, 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	r = l.add(m, size, p.config.Colors)
	p.register(r)
	return r.start, r.block, nil
}

// mapNew asks the system for memory, a second time after giving it the cache.
// bytes is what the caller of Allocate wanted. The caller holds exchange until
// the memory is registered.
func (p *Pool) mapNew(bytes, size int) (Mapping, error) {
	if p.closed.Load() {
		return Mapping{}, p.errClosed("allocate")
	}
	if p.frozen.Load() > 0 {
		return Mapping{}, fmt.Errorf("%s: no cached block of %d bytes: %w", p.config.Name, bytes, runtime.ErrFrozen)
	}
	m, err := p.config.System.Map(size)
	if err != nil {
		if _, err := p.releaseUnused(false); err != nil {
			return Mapping{}, err
		}
		m, err = p.config.System.Map(size)
	}
	if err != nil {
		return Mapping{}, fmt.Errorf("%s: allocate %d bytes with %d live: %w: %w", p.config.Name,
			bytes, p.live.Load(), runtime.ErrOutOfMemory, err)
	}
	if (m.Addr+uintptr(m.Bytes))>>addressBits != 0 {
		err := fmt.Errorf("%s: memory at %#x, beyond %d-bit addresses: %w", p.config.Name, m.Addr, addressBits, runtime.ErrUnsupported)
		return Mapping{}, errors.Join(err, p.config.System.Unmap(m))
	}
	return m, nil
}

// register makes the addresses of a region known.
func (p *Pool) register(r *region) { p.index.set(r.Addr, r.indexed(), r) }

// Deallocate takes a block back.
func (p *Pool) Deallocate(ptr uintptr) error {
	var err error
	if ptr != 0 {
		err = p.give(ptr)
	}
	switch {
	case err == nil && ptr != 0:
		return nil
	case p.closed.Load():
		return p.errClosed("deallocate")
	case err != nil:
		return fmt.Errorf("%s: deallocate %w", p.config.Name, err)
	}
	return nil
}

// give finds the owner of a block and gives it back to that.
func (p *Pool) give(ptr uintptr) error {
	r := p.index.find(ptr)
	switch {
	case r == nil:
		return errForeign(ptr)
	case r.slab != nil:
		return p.giveSmall(r, ptr)
	}
	return p.giveLarge(r, ptr)
}

func (p *Pool) giveSmall(r *region, ptr uintptr) error {
	r.slab.mu.Lock()
	err := r.slab.give(r, ptr)
	r.slab.mu.Unlock()
	if err == nil {
		p.live.Add(-int64(r.block))
	}
	return err
}

func (p *Pool) giveLarge(r *region, ptr uintptr) error {
	if p.config.CacheLimit >= 0 {
		p.exchange.RLock()
		defer p.exchange.RUnlock()
	}
	l := &p.large
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.give(r, ptr); err != nil {
		return err
	}
	p.live.Add(-int64(r.block))
	if p.config.CacheLimit < 0 || l.cachedBytes <= p.config.CacheLimit || p.frozen.Load() > 0 {
		return nil
	}
	l.remove(r)
	return p.unmap(r)
}

// unmap returns a region to the system that its owner has let go.
func (p *Pool) unmap(r *region) error {
	p.index.set(r.Addr, r.indexed(), nil)
	if err := p.config.System.Unmap(r.Mapping); err != nil {
		return fmt.Errorf("%#x to the system: %w", r.Addr, err)
	}
	return nil
}

// releaseUnused returns what is not live to the system (everything if force)
// and says how many bytes of it counted as cached. The caller holds exchange.
func (p *Pool) releaseUnused(force bool) (released int64, err error) {
	var errs []error
	release := func(n *counters, remove func(bool) []*region) {
		cached := n.cachedBytes
		for _, r := range remove(force) {
			errs = append(errs, p.unmap(r))
		}
		released += cached - n.cachedBytes
	}
	for i := range p.classes {
		c := &p.classes[i]
		c.mu.Lock()
		release(&c.counters, c.removeUnused)
		c.mu.Unlock()
	}
	p.large.mu.Lock()
	release(&p.large.counters, p.large.removeUnused)
	p.large.mu.Unlock()
	if err := errors.Join(errs...); err != nil {
		return released, fmt.Errorf("%s: returning memory: %w", p.config.Name, err)
	}
	return released, nil
}

// Trim returns what is not handed out to the system, and how much that was.
func (p *Pool) Trim() (int64, error) {
	p.exchange.RLock()
	defer p.exchange.RUnlock()
	if p.closed.Load() {
		return 0, p.errClosed("trim")
	}
	if p.frozen.Load() > 0 {
		return 0, fmt.Errorf("%s: trim: %w", p.config.Name, runtime.ErrFrozen)
	}
	return p.releaseUnused(false)
}

// Freeze stops the pool from exchanging memory with the system. What is under
// way is over when it returns.
func (p *Pool) Freeze() {
	p.exchange.Lock()
	defer p.exchange.Unlock()
	p.frozen.Add(1)
}

// Unfreeze ends one Freeze.
func (p *Pool) Unfreeze() {
	for n := p.frozen.Load(); n > 0 && !p.frozen.CompareAndSwap(n, n-1); {
		n = p.frozen.Load()
	}
}

// Close returns everything to the system, which is not asked for anything
// afterwards. What is still handed out is reported as an error wrapping
// [runtime.ErrLeak].
func (p *Pool) Close() error {
	p.exchange.Lock()
	defer p.exchange.Unlock()
	if p.closed.Swap(true) {
		return nil
	}
	var leak error
	if blocks := p.Stats().LiveBlocks; blocks > 0 {
		leak = fmt.Errorf("%s: closed with %d allocations of %d bytes in all: %w", p.config.Name, blocks, p.live.Load(), runtime.ErrLeak)
	}
	_, err := p.releaseUnused(true)
	return errors.Join(leak, err)
}

// Closed reports whether Close was called.
func (p *Pool) Closed() bool { return p.closed.Load() }

// Stats returns the counters.
func (p *Pool) Stats() runtime.Stats {
	s := runtime.Stats{PeakBytes: p.peak.Load(), Frozen: p.frozen.Load() > 0}
	if !p.closed.Load() {
		s.LiveBytes = p.live.Load()
	}
	add := func(n *counters) {
		s.LiveBlocks += n.liveBlocks
		s.CachedBytes += n.cachedBytes
		s.Allocations += n.allocations
		s.PoolHits += n.hits
	}
	for i := range p.classes {
		c := &p.classes[i]
		c.mu.Lock()
		add(&c.counters)
		c.mu.Unlock()
	}
	p.large.mu.Lock()
	add(&p.large.counters)
	p.large.mu.Unlock()
	return s
}

func (p *Pool) errClosed(what string) error {
	return fmt.Errorf("%s: %s: %w", p.config.Name, what, runtime.ErrClosed)
}

func (p *Pool) roundToPages(bytes int) int {
	return (bytes + p.config.PageBytes - 1) / p.config.PageBytes * p.config.PageBytes
}

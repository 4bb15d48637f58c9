// Package pool is the allocator of every runtime: it allocates blocks from the memory that a [System] maps, caches
// freed blocks, counts, and detects double frees and foreign pointers. It never accesses the memory itself, so it
// serves device memory as well as host memory.
package pool

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/runtime"
)

// System is the source of memory. Its methods may be called from several goroutines at once.
type System interface {
	// Map returns memory of this size that starts at a multiple of [Granule].
	Map(bytes int) (Mapping, error)
	// Unmap returns memory to the system.
	Unmap(Mapping) error
	// Fence returns a function that waits until the work submitted before Fence that may use memory has ended, or
	// reports after a bounded time why it has not. The pool calls both before it unmaps freed memory: Fence while it
	// keeps Freeze and Close out, and wait, once, with no lock held, possibly after Close.
	Fence() (wait func() error)
}

// Mapping is a piece of memory from the system.
type Mapping struct {
	Addr   uintptr // first usable address, a multiple of Granule below 2^48
	Handle uintptr // the system's handle
	Bytes  int     // usable bytes
}

// Config describes how a pool cuts and caches memory.
type Config struct {
	// Name begins the pool's error messages.
	Name string
	// System is the source of memory.
	System System
	// SlabBytes is the size of a mapping that is cut into blocks of one size
	// class, a multiple of Granule. Blocks above an eighth of it are
	// mapped one by one.
	SlabBytes int
	// PageBytes is the unit to which sizes of such mappings are rounded up, at most Granule.
	PageBytes int
	// Colors is the number of different offsets at which such blocks start in their mappings, in turn; at most 64, and
	// 0 means 1. Mappings start at equal offsets in a page, so equal positions in several large blocks would share a
	// set of a processor's cache and evict each other if they are read together, as in a reduction.
	Colors int
}

// Pool is safe for concurrent use.
//
// Small sizes are cut from slabs, with one lock for each size class; large ones are separate mappings. No such lock is
// held while the system works.
type Pool struct {
	config       Config // as it was passed
	largestClass int    // the largest block cut from a slab
	colorRoom    int    // additional length of a mapping for its block's color

	classes []class // of small blocks, by size
	large   large   // blocks that have a mapping each
	index   index   // finds the region of an address

	live, peak atomic.Int64 // bytes of blocks in use, and their maximum
	frozen     atomic.Int32 // calls of Freeze without Unfreeze
	closed     atomic.Bool  // Close was called

	// exchange is held for reading while memory moves from or to the system, for which Freeze and Close wait. It is
	// locked before any other.
	exchange sync.RWMutex
}

// New returns an empty pool. It requests memory from the system only when Allocate needs some.
func New(c Config) *Pool {
	c.Colors = max(c.Colors, 1)
	p := &Pool{
		config:       c,
		largestClass: c.SlabBytes / 8,
		colorRoom:    (c.Colors - 1) * colorStep,
	}
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

// Allocate returns a block of at least this size, address 0 for size 0.
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

// AllocateMapping returns a block with its own mapping, of exactly bytes rounded up to pages, however few these are.
// It is for libraries that map the memory of one device into others: they map whole mappings and, if the devices have
// to agree, compare their exact size.
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

// countLive counts an allocated block.
func (p *Pool) countLive(size int) {
	live := p.live.Add(int64(size))
	for peak := p.peak.Load(); live > peak && !p.peak.CompareAndSwap(peak, live); {
		peak = p.peak.Load()
	}
}

func (p *Pool) allocateSmall(bytes int) (ptr uintptr, size int, err error) {
	i, _ := roundSize(bytes)
	c := &p.classes[i]

	c.Lock()
	ptr, ok := c.take(true)
	c.Unlock()
	if ok {
		return ptr, c.size, nil
	}
	m, err := p.mapNew(bytes, p.config.SlabBytes)
	if err != nil {
		return 0, 0, err
	}
	defer p.exchange.RUnlock()
	c.Lock()
	defer c.Unlock()
	p.register(c.add(m))
	ptr, _ = c.take(false)
	return ptr, c.size, nil
}

// allocateLarge returns a cached block of at least bytes and at most limit bytes, or else a new one of size bytes.
func (p *Pool) allocateLarge(bytes, size, limit int) (ptr uintptr, got int, err error) {
	l := &p.large

	l.Lock()
	r, ok := l.take(bytes, limit)
	l.Unlock()
	if ok {
		return r.start, r.block, nil
	}
	m, err := p.mapNew(bytes, size+p.roundToPages(p.colorRoom))
	if err != nil {
		return 0, 0, err
	}
	defer p.exchange.RUnlock()
	l.Lock()
	defer l.Unlock()
	r = l.add(m, size, p.config.Colors)
	p.register(r)
	return r.start, r.block, nil
}

// mapNew requests memory from the system, and retries after returning the cache. bytes is the size passed to Allocate.
// If it succeeds, it leaves exchange locked for reading until the caller has registered the memory.
func (p *Pool) mapNew(bytes, size int) (Mapping, error) {
	op := fmt.Sprintf("allocate %d bytes", bytes)
	m, err := p.tryMap(op, size)
	if errors.Is(err, runtime.ErrOutOfMemory) {
		if _, flushErr := p.flush(op); flushErr != nil {
			return Mapping{}, fmt.Errorf("%w; the cache could not be freed: %w", err, flushErr)
		}
		m, err = p.tryMap(op, size)
	}
	return m, err
}

// tryMap is one attempt of mapNew.
func (p *Pool) tryMap(op string, size int) (Mapping, error) {
	if err := p.beginExchange(op); err != nil {
		return Mapping{}, err
	}
	m, err := p.config.System.Map(size)
	if err != nil {
		err = fmt.Errorf("%s: %s with %d live: %w: %w", p.config.Name, op, p.live.Load(), runtime.ErrOutOfMemory, err)
	} else if (m.Addr+uintptr(m.Bytes))>>addressBits != 0 {
		err = fmt.Errorf("%s: memory at %#x, beyond %d-bit addresses: %w",
			p.config.Name, m.Addr, addressBits, runtime.ErrUnsupported)
		err = errors.Join(err, p.config.System.Unmap(m))
	}
	if err != nil {
		p.exchange.RUnlock()
		return Mapping{}, err
	}
	return m, nil
}

// beginExchange locks exchange for reading, if memory may move.
func (p *Pool) beginExchange(op string) error {
	p.exchange.RLock()
	err := p.exchangeable(op)
	if err != nil {
		p.exchange.RUnlock()
	}
	return err
}

// exchangeable returns the reason why no memory may move from or to the system, nil if it may.
func (p *Pool) exchangeable(op string) error {
	switch {
	case p.closed.Load():
		return p.errClosed(op)
	case p.frozen.Load() > 0:
		return fmt.Errorf("%s: %s: %w", p.config.Name, op, runtime.ErrFrozen)
	}
	return nil
}

// register registers the addresses of a region.
func (p *Pool) register(r *region) {
	p.index.set(r.Addr, r.indexed(), r)
}

// Deallocate frees a block.
func (p *Pool) Deallocate(ptr uintptr) error {
	return p.takeBack("deallocate", ptr, true)
}

// Release frees a block of AllocateMapping like Deallocate, but returns its memory to the system and never reuses it:
// it is for memory to which others still have access. If that is not possible now, because the pool is frozen or work
// does not end, the next flush, Trim or Close does it.
func (p *Pool) Release(ptr uintptr) error {
	return p.takeBack("release", ptr, false)
}

func (p *Pool) takeBack(op string, ptr uintptr, reuse bool) error {
	var err error
	if ptr != 0 {
		err = p.give(ptr, reuse)
	}
	switch {
	case err == nil && ptr != 0:
		return nil
	case p.closed.Load():
		return p.errClosed(op)
	case err != nil:
		return fmt.Errorf("%s: %s %w", p.config.Name, op, err)
	}
	return nil
}

// give returns a block to its owner.
func (p *Pool) give(ptr uintptr, reuse bool) error {
	r := p.index.find(ptr)
	switch {
	case r == nil:
		return errForeign(ptr)
	case r.slab == nil:
		return p.giveLarge(r, ptr, reuse)
	case !reuse:
		return fmt.Errorf("%#x, which shares its mapping with others: %w", ptr, runtime.ErrArgument)
	}
	return p.giveSmall(r, ptr)
}

func (p *Pool) giveSmall(r *region, ptr uintptr) error {
	r.slab.Lock()
	err := r.slab.give(r, ptr)
	r.slab.Unlock()
	if err == nil {
		p.live.Add(-int64(r.block))
	}
	return err
}

// giveLarge frees a large block, and returns it to the system if it may not be reused.
func (p *Pool) giveLarge(r *region, ptr uintptr, reuse bool) error {
	l := &p.large
	l.Lock()
	err := l.give(r, ptr, reuse)
	uses := r.uses
	l.Unlock()
	if err != nil {
		return err
	}
	p.live.Add(-int64(r.block))
	if reuse {
		return nil
	}
	unused := idle{r: uses}
	if p.waitIdle("deallocate", unused) != nil {
		return nil // a later flush, or Close, returns it
	}
	_, err = p.returnUnused(unused)
	return err
}

// idle has regions without live blocks, and the number of uses of each at that time: a region whose number has changed
// was in use in the meantime.
type idle map[*region]uint64

// unchanged reports whether no block was allocated since. The caller must hold the owner's lock.
func (i idle) unchanged(r *region) bool {
	uses, listed := i[r]
	return listed && uses == r.uses
}

// flush returns unused memory to the system, and its size in bytes. The cache is unchanged during the wait for the
// system's work.
func (p *Pool) flush(op string) (released int64, err error) {
	unused := make(idle)
	for o := range p.owners() {
		for r := range o.regions() {
			if r.liveCount() == 0 {
				unused[r] = r.uses
			}
		}
	}
	if err := p.waitIdle(op, unused); err != nil {
		return 0, err
	}
	return p.returnUnused(unused)
}

// waitIdle waits until no work uses these regions. It fails if memory may not move.
func (p *Pool) waitIdle(op string, unused idle) error {
	if err := p.beginExchange(op); err != nil {
		return err
	}
	if len(unused) == 0 {
		p.exchange.RUnlock()
		return nil
	}
	wait := p.config.System.Fence()
	p.exchange.RUnlock()
	return wait()
}

// returnUnused returns the regions that are still idle to the system, unless memory may no longer move.
func (p *Pool) returnUnused(unused idle) (released int64, err error) {
	if len(unused) == 0 || p.beginExchange("return memory") != nil {
		return 0, nil
	}
	defer p.exchange.RUnlock()
	return p.unmap(unused.unchanged)
}

// unmap returns regions to the system, and the number of their bytes that counted as cached. The caller holds
// exchange.
func (p *Pool) unmap(which func(*region) bool) (released int64, err error) {
	var gone []*region
	for o := range p.owners() {
		before := o.counts().cachedBytes
		gone = append(gone, remove(o, which)...)
		released += before - o.counts().cachedBytes
	}
	var errs []error
	for _, r := range gone {
		p.index.set(r.Addr, r.indexed(), nil)
		if err := p.config.System.Unmap(r.Mapping); err != nil {
			errs = append(errs, fmt.Errorf("%#x: %w", r.Addr, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return released, fmt.Errorf("%s: returning memory: %w", p.config.Name, err)
	}
	return released, nil
}

// owners yields the classes and the large blocks, each locked during its turn.
func (p *Pool) owners() iter.Seq[owner] {
	return func(yield func(owner) bool) {
		turn := func(o owner) bool {
			o.Lock()
			defer o.Unlock()
			return yield(o)
		}
		for i := range p.classes {
			if !turn(&p.classes[i]) {
				return
			}
		}
		turn(&p.large)
	}
}

// Trim returns unused memory to the system, and its size.
func (p *Pool) Trim() (int64, error) {
	return p.flush("trim")
}

// Freeze stops the pool from exchanging memory with the system. Exchanges in
// flight have ended when it returns.
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

// Frozen reports whether the pool exchanges no memory with the system.
func (p *Pool) Frozen() bool {
	return p.frozen.Load() > 0
}

// Close returns everything to the system, and makes no requests afterwards; the caller has made sure that nothing uses
// the memory. Blocks that are still allocated are reported as an error wrapping [runtime.ErrLeak].
func (p *Pool) Close() error {
	p.exchange.Lock()
	defer p.exchange.Unlock()
	if p.closed.Swap(true) {
		return nil
	}
	var leak error
	if blocks := p.Stats().LiveBlocks; blocks > 0 {
		leak = fmt.Errorf("%s: closed with %d allocations of %d bytes in all: %w",
			p.config.Name, blocks, p.live.Load(), runtime.ErrLeak)
	}
	_, err := p.unmap(func(*region) bool { return true })
	return errors.Join(leak, err)
}

// Closed reports whether Close was called.
func (p *Pool) Closed() bool {
	return p.closed.Load()
}

// Stats returns the counters.
func (p *Pool) Stats() runtime.Stats {
	s := runtime.Stats{PeakBytes: p.peak.Load(), Frozen: p.frozen.Load() > 0}
	if !p.closed.Load() {
		s.LiveBytes = p.live.Load()
	}
	for o := range p.owners() {
		n := o.counts()
		s.LiveBlocks += n.liveBlocks
		s.CachedBytes += n.cachedBytes
		s.Allocations += n.allocations
		s.PoolHits += n.hits
	}
	return s
}

func (p *Pool) errClosed(op string) error {
	return fmt.Errorf("%s: %s: %w", p.config.Name, op, runtime.ErrClosed)
}

func (p *Pool) roundToPages(bytes int) int {
	return (bytes + p.config.PageBytes - 1) / p.config.PageBytes * p.config.PageBytes
}

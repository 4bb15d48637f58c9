package pool

import (
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/runtime"
)

func TestSizeClasses(t *testing.T) {
	const largest = 1 << 22
	var sizes []int // by class
	for bytes := 1; bytes <= largest; bytes++ {
		index, size := roundSize(bytes)
		if index == len(sizes) {
			sizes = append(sizes, size)
		}
		if index >= len(sizes) || sizes[index] != size {
			t.Fatalf("%d bytes: class %d of %d bytes; so far there are %d", bytes, index, size, len(sizes))
		}
		if waste := size - bytes; waste < 0 || waste > max(alignment-1, bytes/8) || size%alignment != 0 {
			t.Fatalf("%d bytes round to %d", bytes, size)
		}
	}
	for class, size := range sizes {
		index, same := roundSize(size)
		assert.Equal(t, class, index)
		assert.Equal(t, size, same, "a class size rounds to itself")
	}
	for shift := 18; shift < 62; shift++ {
		for _, bytes := range []int{1<<shift - 1, 1 << shift, 1<<shift + 1, 3<<shift/2 + 12345} {
			_, size := roundSize(bytes)
			assert.GreaterOrEqual(t, size, bytes)
			assert.LessOrEqual(t, size-bytes, bytes/8)
		}
	}
}

func TestMemoryIsMappedOnceAndReturned(t *testing.T) {
	eachConfig(t, 1<<30, func(t *testing.T, p *Pool, s *fakeSystem) {
		sizes := []int{1, 65, 5000, p.largestClass, p.largestClass + 1, 2 * p.largestClass, 10 * p.largestClass}
		for range 100 {
			var ptrs []uintptr
			for _, size := range sizes {
				ptrs = append(ptrs, allocate(t, p, size))
			}
			free(t, p, ptrs...)
		}
		assert.Equal(t, len(sizes), s.calls, "later rounds are served from the pool")
		assert.Equal(t, int64(99*len(sizes)), p.Stats().PoolHits)

		released, err := p.Trim()
		require.NoError(t, err)
		assert.Positive(t, released)
		assert.Zero(t, s.bytes)
		assert.Zero(t, p.Stats().CachedBytes)
	})
}

func TestCloseReturnsLeakedMemory(t *testing.T) {
	eachConfig(t, 1<<30, func(t *testing.T, p *Pool, s *fakeSystem) {
		for _, size := range []int{1, 5000, p.largestClass + 1} {
			allocate(t, p, size)
		}
		err := p.Close()
		require.ErrorIs(t, err, runtime.ErrLeak)
		assert.ErrorContains(t, err, "test: closed with 3 allocations")
		assert.ErrorContains(t, err, "memory still live: free tensors, close communicators and exchanges first")
		assert.Zero(t, s.bytes)
		assert.Equal(t, runtime.Stats{PeakBytes: p.Stats().PeakBytes, Allocations: 3}, p.Stats())
	})
}

func TestAfterClose(t *testing.T) {
	p, _ := newTestPool(t, configs["host"], 1<<30)
	ptr := allocate(t, p, 64)
	require.False(t, p.Closed())
	require.ErrorIs(t, p.Close(), runtime.ErrLeak)
	require.True(t, p.Closed())
	for _, bytes := range []int{0, 64, 1 << 20} {
		_, err := p.Allocate(bytes)
		assert.ErrorIs(t, err, runtime.ErrClosed, "%d bytes", bytes)
	}
	for _, ptr := range []uintptr{0, 1, ptr} {
		assert.ErrorIs(t, p.Deallocate(ptr), runtime.ErrClosed, "%#x", ptr)
	}
	_, err := p.Trim()
	assert.ErrorIs(t, err, runtime.ErrClosed)
	assert.NoError(t, p.Close())
}

func TestOutOfMemoryFlushesTheCache(t *testing.T) {
	const limit = 8 << 20
	c := configs["host"]
	c.Colors = 0
	p, s := newTestPool(t, c, limit)
	kept := allocate(t, p, 1<<20)
	for _, size := range []int{2 << 20, 100} { // 2 MiB each: of a large block, of a slab
		free(t, p, allocate(t, p, size))
	}
	require.Equal(t, 5<<20, s.bytes)
	big := allocate(t, p, 6<<20)
	assert.Equal(t, 7<<20, s.bytes, "the cached memory made room")
	assert.Zero(t, p.Stats().CachedBytes)

	for _, size := range []int{4 << 20, 100} {
		calls := s.calls
		_, err := p.Allocate(size)
		require.ErrorIs(t, err, runtime.ErrOutOfMemory)
		require.ErrorIs(t, err, errNoMemory)
		assert.Equal(t, calls+2, s.calls, "one retry")
	}
	free(t, p, kept, big, allocate(t, p, 1<<20))
	free(t, p, allocate(t, p, limit))
}

func TestImpossibleSizes(t *testing.T) {
	eachConfig(t, 1<<30, func(t *testing.T, p *Pool, _ *fakeSystem) {
		for _, bytes := range []int{-1, math.MinInt} {
			_, err := p.Allocate(bytes)
			assert.ErrorIs(t, err, runtime.ErrArgument, "%d bytes", bytes)
		}
		for _, bytes := range []int{math.MaxInt / 9 * 8, math.MaxInt - 63, math.MaxInt} {
			_, err := p.Allocate(bytes)
			assert.ErrorIs(t, err, runtime.ErrOutOfMemory, "%d bytes", bytes)
		}
	})
}

func TestUnmapFailureIsReported(t *testing.T) {
	s := newFakeSystem(1 << 30)
	s.stuck = true
	c := configs["host"]
	c.Name, c.System = "test", s
	p := New(c)
	assert.ErrorIs(t, p.Release(allocate(t, p, 1<<20)), errStuck)
	free(t, p, allocate(t, p, 64))
	_, err := p.Trim()
	assert.ErrorIs(t, err, errStuck)
	free(t, p, allocate(t, p, 64))
	assert.ErrorIs(t, p.Close(), errStuck)
}

func TestLargeBlocksAreReusedByBestFit(t *testing.T) {
	p, _ := newTestPool(t, configs["host"], 1<<30)
	blocks := make(map[int]uintptr)
	sizes := []int{8 << 20, 1 << 20, 9 << 20, 4 << 20}
	for _, size := range sizes {
		blocks[size] = allocate(t, p, size)
	}
	for _, size := range sizes {
		free(t, p, blocks[size])
	}
	assert.Equal(t, blocks[8<<20], allocate(t, p, 15<<19))
	assert.Equal(t, blocks[1<<20], allocate(t, p, 1<<20))
	other := allocate(t, p, 1<<20)
	for _, ptr := range blocks {
		assert.NotEqual(t, ptr, other)
	}
	// A frozen pool rather wastes memory than fail.
	p.Freeze()
	assert.Equal(t, blocks[4<<20], allocate(t, p, 1<<20))
	_, err := p.Allocate(10 << 20)
	assert.ErrorIs(t, err, runtime.ErrFrozen)
	_, err = p.Trim()
	assert.ErrorIs(t, err, runtime.ErrFrozen)
	p.Unfreeze()
	free(t, p, blocks[8<<20], blocks[1<<20], other, blocks[4<<20])
}

func TestErrorsNameTheProblem(t *testing.T) {
	eachConfig(t, 1<<30, func(t *testing.T, p *Pool, _ *fakeSystem) {
		ptr := allocate(t, p, 1000)
		assert.ErrorContains(t, p.Deallocate(ptr+192), "192 bytes inside")
		assert.ErrorIs(t, p.Deallocate(ptr+1024), runtime.ErrForeignPointer, "the next block was never handed out")
		free(t, p, ptr)
		err := p.Deallocate(ptr)
		assert.ErrorIs(t, err, runtime.ErrDoubleFree)
		assert.ErrorContains(t, err, "test: deallocate 0x")
		_, err = p.Trim()
		require.NoError(t, err)
		assert.ErrorIs(t, p.Deallocate(ptr), runtime.ErrForeignPointer)
		_, err = p.Allocate(-5)
		assert.ErrorContains(t, err, "test: allocate -5 bytes")
	})
}

// TestColors: neighbouring positions of large blocks must not compete for the
// same set of a cache with 4 KiB ways.
func TestColors(t *testing.T) {
	c := configs["host"]
	p, s := newTestPool(t, c, 1<<30)
	offsets := make(map[uintptr]bool)
	for range c.Colors {
		ptr := allocate(t, p, 1<<20)
		defer free(t, p, ptr)
		assert.Zero(t, ptr%alignment)
		offsets[ptr%4096/alignment] = true
		assert.LessOrEqual(t, ptr%Granule+1<<20, uintptr(s.mapped[ptr&^(Granule-1)]), "the block ends in its mapping")
	}
	assert.Len(t, offsets, c.Colors)
	before, offset := allocate(t, p, 1<<20), allocate(t, p, 1<<20)
	assert.ErrorIs(t, p.Deallocate(offset-alignment), runtime.ErrForeignPointer, "in the mapping, before the block")
	free(t, p, before, offset)
}

// TestSlabsFillUp takes more blocks of one class than a slab has.
func TestSlabsFillUp(t *testing.T) {
	eachConfig(t, 1<<30, func(t *testing.T, p *Pool, s *fakeSystem) {
		const size = 32 << 10
		seen := make(map[uintptr]bool)
		for range 3 * p.config.SlabBytes / size {
			ptr := allocate(t, p, size)
			require.False(t, seen[ptr])
			seen[ptr] = true
		}
		assert.Equal(t, 3, s.calls)
		for ptr := range seen {
			free(t, p, ptr)
		}
		for range seen {
			require.True(t, seen[allocate(t, p, size)], "the same blocks again")
		}
		assert.Equal(t, 3, s.calls)
		for ptr := range seen {
			free(t, p, ptr)
		}
	})
}

func TestOneOfManyFreesSucceeds(t *testing.T) {
	p, _ := newTestPool(t, configs["host"], 1<<30)
	for _, size := range []int{64, 1 << 20} {
		for range 200 {
			ptr := allocate(t, p, size)
			var freed, double atomic.Int64
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					switch err := p.Deallocate(ptr); {
					case err == nil:
						freed.Add(1)
					case errors.Is(err, runtime.ErrDoubleFree):
						double.Add(1)
					}
				})
			}
			wg.Wait()
			require.Equal(t, int64(1), freed.Load())
			require.Equal(t, int64(3), double.Load())
		}
	}
}

// TestHighAddressesAreRefused: some systems have more than 48 bits of them.
func TestHighAddressesAreRefused(t *testing.T) {
	p, s := newTestPool(t, configs["device"], 1<<30)
	s.next = 1<<addressBits - Granule
	_, err := p.Allocate(64)
	require.ErrorIs(t, err, runtime.ErrUnsupported)
	assert.Empty(t, s.mapped, "that memory went back")
	s.next, s.unused = 1<<addressBits-10*Granule, make(map[int][]uintptr)
	free(t, p, allocate(t, p, 64))
}

func TestDoesNotAllocateGoMemory(t *testing.T) {
	eachConfig(t, 1<<30, func(t *testing.T, p *Pool, _ *fakeSystem) {
		for _, size := range []int{1, 4096, p.largestClass, 2 * p.largestClass} {
			assert.Zero(t, testing.AllocsPerRun(1000, func() {
				ptr, err := p.Allocate(size)
				if err != nil || p.Deallocate(ptr) != nil {
					t.Fail()
				}
			}), "%d bytes", size)
		}
	})
}

func TestFreezingNests(t *testing.T) {
	eachConfig(t, 1<<30, func(t *testing.T, p *Pool, _ *fakeSystem) {
		p.Freeze()
		p.Freeze()
		p.Unfreeze()
		_, err := p.Allocate(64)
		assert.ErrorIs(t, err, runtime.ErrFrozen, "one Freeze is left")
		p.Unfreeze()
		p.Unfreeze() // one too many
		p.Freeze()
		assert.True(t, p.Stats().Frozen)
		p.Unfreeze()
		free(t, p, allocate(t, p, 64))
	})
}

// A block with its own mapping has it, and its size, whatever the pool
// caches.
func TestAllocateMappingIsExact(t *testing.T) {
	p, s := newTestPool(t, configs["device"], 1<<30)
	free(t, p, allocate(t, p, 5*Granule)) // cached and large enough for the next
	for range 2 {
		var ptrs []uintptr
		for pages := 1; pages <= 5; pages++ {
			ptr, err := p.AllocateMapping(pages*Granule - 17)
			require.NoError(t, err)
			assert.Equal(t, pages*Granule, s.mapped[ptr])
			ptrs = append(ptrs, ptr)
		}
		assert.EqualValues(t, 15*Granule, p.Stats().LiveBytes)
		free(t, p, ptrs...)
	}
	assert.Equal(t, 5, s.calls, "one mapping for each size, reused in the second round")

	none, err := p.AllocateMapping(0)
	require.NoError(t, err)
	assert.Zero(t, none)
	_, err = p.AllocateMapping(-1)
	assert.ErrorIs(t, err, runtime.ErrArgument)
	_, err = p.AllocateMapping(math.MaxInt)
	assert.ErrorIs(t, err, runtime.ErrOutOfMemory)
}

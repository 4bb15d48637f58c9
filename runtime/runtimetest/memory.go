package runtimetest

import (
	"errors"
	"math"
	"sync"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

var memoryTests = []test{
	{"blocks are aligned and apart", testBlocks},
	{"zero bytes", testZeroBytes},
	{"impossible sizes", testImpossibleSizes},
	{"freed memory is reused", testReuse},
	{"statistics", testStats},
	{"double free", testDoubleFree},
	{"foreign pointers", testForeignPointers},
	{"frozen", testFrozen},
	{"trim", testTrim},
	{"concurrent use", testConcurrentMemory},
}

var blockSizes = []int{1, 2, 63, 64, 65, 100, 512, 513, 1000, 4096, 4097, 65536, 100_000,
	1 << 18, 1<<18 + 1, 1 << 20, 3<<20 + 5}

// testBlocks allocates many blocks, writes each one over its whole length and
// finds all of them intact: so they do not overlap.
func testBlocks(d *device) {
	type block struct {
		ptr  uintptr
		data []byte
	}
	var blocks []block
	for range 3 {
		for _, size := range blockSizes {
			b := block{data: d.randomBytes(size)}
			b.ptr = d.upload(b.data)
			assert.NotZero(d, b.ptr)
			assert.Zero(d, b.ptr%64, "%d bytes at %#x are not aligned to 64", size, b.ptr)
			blocks = append(blocks, b)
		}
	}
	for _, b := range blocks {
		require.Equal(d, b.data, d.download(b.ptr, len(b.data)), "block of %d bytes", len(b.data))
	}
}

func testZeroBytes(d *device) {
	ptr := d.block(0)
	assert.Zero(d, ptr)
	require.NoError(d, d.Deallocate(0))
	require.NoError(d, d.CopyIn(0, nil))
	require.NoError(d, d.CopyOut(nil, 0))
	require.NoError(d, d.Copy(0, 0, 0))
	require.NoError(d, d.Fill(0, 0, dtype.F32, 1))
	require.NoError(d, d.CopyStrided(0, []int{3, 1}, 0, []int{3, 1}, []int{0, 3}, 4))
	assert.Zero(d, d.Stats().LiveBlocks)
}

func testImpossibleSizes(d *device) {
	_, err := d.Allocate(-1)
	assert.ErrorIs(d, err, runtime.ErrArgument)
	for _, size := range []int{math.MaxInt / 2, math.MaxInt - 63, math.MaxInt} {
		_, err := d.Allocate(size)
		assert.ErrorIs(d, err, runtime.ErrOutOfMemory, "%d bytes", size)
	}
	assert.Zero(d, d.Stats().LiveBytes)
	d.upload([]byte("the runtime still works"))
}

func testReuse(d *device) {
	for _, size := range blockSizes {
		ptr := d.block(size)
		require.NoError(d, d.Deallocate(ptr))
		before := d.Stats()
		ptr = d.block(size)
		after := d.Stats()
		assert.Equal(d, before.PoolHits+1, after.PoolHits, "%d bytes came from the pool", size)
		assert.Equal(d, before.Allocations+1, after.Allocations)
		assert.Equal(d, before.CachedBytes+before.LiveBytes, after.CachedBytes+after.LiveBytes, "%d bytes", size)
		require.NoError(d, d.Deallocate(ptr))
	}
}

func testStats(d *device) {
	require.Zero(d, d.Stats())
	var live, blocks, peak int64
	var ptrs []uintptr
	for _, size := range blockSizes {
		ptr := d.block(size)
		ptrs = append(ptrs, ptr)
		s := d.Stats()
		blocks++
		assert.GreaterOrEqual(d, s.LiveBytes, live+int64(size), "%d bytes", size)
		assert.Equal(d, blocks, s.LiveBlocks)
		assert.Equal(d, blocks, s.Allocations)
		assert.Equal(d, s.LiveBytes, s.PeakBytes, "nothing was freed yet")
		live = s.LiveBytes
		peak = s.PeakBytes
	}
	for _, ptr := range ptrs {
		require.NoError(d, d.Deallocate(ptr))
		blocks--
		s := d.Stats()
		assert.Less(d, s.LiveBytes, live)
		assert.Equal(d, blocks, s.LiveBlocks)
		assert.Equal(d, peak, s.PeakBytes)
		live = s.LiveBytes
	}
	assert.Zero(d, live)
	assert.Positive(d, d.Stats().CachedBytes)
	assert.False(d, d.Stats().Frozen)
}

// testDoubleFree also shows that a double free changes nothing: the block is
// handed out once.
func testDoubleFree(d *device) {
	for _, size := range blockSizes {
		ptr := d.block(size)
		require.NoError(d, d.Deallocate(ptr))
		before := d.Stats()
		require.ErrorIs(d, d.Deallocate(ptr), runtime.ErrDoubleFree, "%d bytes", size)
		require.Equal(d, before, d.Stats())
		require.NotEqual(d, d.allocate(size), d.allocate(size))
	}
}

func testForeignPointers(d *device) {
	second := newDevice(d.T, d.open, d.reference)
	foreign := []uintptr{1, 64, 0x1000, 1 << 63, math.MaxUint &^ 63}
	allocated := make(map[uintptr]bool)
	for _, size := range blockSizes {
		ptr := d.allocate(size)
		allocated[ptr] = true
		foreign = append(foreign, ptr+1, ptr+64, ptr+uintptr(size), ptr+uintptr(size/2), second.allocate(size))
	}
	before := d.Stats()
	for _, ptr := range foreign {
		if allocated[ptr] {
			continue // another block happens to start there
		}
		require.ErrorIs(d, d.Deallocate(ptr), runtime.ErrForeignPointer, "%#x", ptr)
	}
	require.Equal(d, before, d.Stats())
}

func testFrozen(d *device) {
	f, ok := d.Runtime.(runtime.Freezer)
	if !ok {
		d.Skip("the runtime is no runtime.Freezer")
	}
	const size, unseen = 1000, 64 << 20
	ptr := d.block(size)
	require.NoError(d, d.Deallocate(ptr))

	f.Freeze()
	require.True(d, d.Stats().Frozen)
	cached := d.block(size) // a cached block is served
	_, err := d.Allocate(unseen)
	require.ErrorIs(d, err, runtime.ErrFrozen)
	require.NoError(d, d.Deallocate(cached))
	held := d.Stats().CachedBytes
	_, err = f.Trim()
	require.ErrorIs(d, err, runtime.ErrFrozen)
	require.Equal(d, held, d.Stats().CachedBytes)

	f.Unfreeze()
	require.False(d, d.Stats().Frozen)
	ptr = d.block(unseen)
	require.NoError(d, d.Deallocate(ptr))
}

func testTrim(d *device) {
	f, ok := d.Runtime.(runtime.Freezer)
	if !ok {
		d.Skip("the runtime is no runtime.Freezer")
	}
	kept := d.randomBytes(1000)
	keptPtr := d.upload(kept)
	var ptrs []uintptr
	for _, size := range blockSizes {
		ptr := d.block(size)
		ptrs = append(ptrs, ptr)
	}
	for _, ptr := range ptrs {
		require.NoError(d, d.Deallocate(ptr))
	}
	before := d.Stats()
	released, err := f.Trim()
	require.NoError(d, err)
	after := d.Stats()
	assert.Positive(d, released)
	assert.Equal(d, before.CachedBytes-released, after.CachedBytes)
	assert.Equal(d, before.LiveBytes, after.LiveBytes)
	assert.Equal(d, kept, d.download(keptPtr, len(kept)), "live memory stays as it was")
}

// testConcurrentMemory has goroutines allocate, write, read and free at random.
func testConcurrentMemory(d *device) {
	const workers, rounds = 8, 150
	var wg sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		wg.Go(func() { errs[w] = churn(d.Runtime, uint64(w), rounds) })
	}
	wg.Wait()
	require.NoError(d, errors.Join(errs...))
	s := d.Stats()
	assert.Zero(d, s.LiveBytes)
	assert.Zero(d, s.LiveBlocks)
	assert.Positive(d, s.PoolHits)
	assert.LessOrEqual(d, s.PoolHits, s.Allocations)
}

package cpu

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/internal/pool"
)

// newRuntime returns a runtime that has to be without live memory in the end.
func newRuntime(t *testing.T) *Runtime {
	rt := New()
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	return rt
}

func allocate(t *testing.T, rt *Runtime, bytes int) uintptr {
	t.Helper()
	ptr, err := rt.Allocate(bytes)
	require.NoError(t, err)
	return ptr
}

func free(t *testing.T, rt *Runtime, ptr uintptr) {
	t.Helper()
	require.NoError(t, rt.Deallocate(ptr))
}

// TestMappings: the system's memory is aligned, zeroed and writable up to its
// last byte.
func TestMappings(t *testing.T) {
	for _, bytes := range []int{pool.Granule, 3*pool.Granule + 1<<16, 64 << 20} {
		m, err := hostMemory{}.Map(bytes)
		require.NoError(t, err)
		assert.Zero(t, m.Addr%pool.Granule)
		assert.Equal(t, bytes, m.Bytes)
		memory := hostmem.Slice[byte](m.Addr, m.Bytes)
		for _, i := range []int{0, 1, bytes / 2, bytes - 1} {
			assert.Zero(t, memory[i])
			memory[i] = 1
		}
		require.NoError(t, hostMemory{}.Unmap(m))
	}
}

// TestConcurrentTrim has one goroutine trim while others write to their blocks:
// memory in use must never go away.
func TestConcurrentTrim(t *testing.T) {
	rt := newRuntime(t)
	const workers, rounds = 4, 300
	var running atomic.Int64
	running.Store(workers)
	var wg sync.WaitGroup
	for w := range uint64(workers) {
		wg.Go(func() {
			defer running.Add(-1)
			rng := rand.New(rand.NewPCG(w, 0))
			for range rounds {
				size := 1 + rng.IntN(1<<rng.IntN(20))
				ptr, err := rt.Allocate(size)
				if !assert.NoError(t, err) {
					return
				}
				memory := hostmem.Slice[byte](ptr, size)
				for i := range memory {
					memory[i] = byte(w)
				}
				if !assert.NoError(t, rt.Deallocate(ptr)) {
					return
				}
			}
		})
	}
	for running.Load() > 0 {
		_, err := rt.Trim()
		require.NoError(t, err)
	}
	wg.Wait()
}

func BenchmarkAllocate(b *testing.B) {
	for name, size := range map[string]int{"64B": 64, "4KiB": 4096, "256KiB": 256 << 10, "16MiB": 16 << 20} {
		rt := New()
		pair := func() {
			ptr, err := rt.Allocate(size)
			if err != nil || rt.Deallocate(ptr) != nil {
				b.Fail()
			}
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				pair()
			}
		})
		b.Run(name+"/parallel", func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					pair()
				}
			})
		})
		require.NoError(b, rt.Close())
	}
}

// BenchmarkFirstTouch writes to memory that comes fresh from the system.
func BenchmarkFirstTouch(b *testing.B) {
	const size = 64 << 20
	rt := New()
	b.SetBytes(size)
	for b.Loop() {
		ptr, err := rt.Allocate(size)
		require.NoError(b, err)
		require.NoError(b, rt.Fill(ptr, size, dtype.U8, 1))
		require.NoError(b, rt.Deallocate(ptr))
		_, err = rt.Trim()
		require.NoError(b, err)
	}
	require.NoError(b, rt.Close())
}

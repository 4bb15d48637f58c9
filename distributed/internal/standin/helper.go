package standin

import (
	"context"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// World runs body for ranks with a runtime each, which must not leak. Worlds before may have used the runtimes.
func World(t *testing.T, ranks int, body func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error) {
	t.Helper()
	require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
		rt := Borrow()
		if err := body(ctx, c, rt); err != nil {
			return err
		}
		return Return(rt)
	}))
}

// FreshWorld is World with new runtimes, for tests that count bytes, or freeze: larger blocks than asked for may be
// cached in used ones.
func FreshWorld(t *testing.T, ranks int, body func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error) {
	t.Helper()
	require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		if err := body(ctx, c, rt); err != nil {
			return err
		}
		return rt.Close()
	}))
}

// idle are runtimes that were returned. To map memory, and to touch it first, takes longer than most steps.
var idle struct {
	sync.Mutex
	runtimes []*cpu.Runtime
}

// Borrow returns a runtime without live memory.
func Borrow() *cpu.Runtime {
	idle.Lock()
	defer idle.Unlock()
	last := len(idle.runtimes) - 1
	if last < 0 {
		return cpu.New()
	}
	rt := idle.runtimes[last]
	idle.runtimes = idle.runtimes[:last]
	return rt
}

// Return takes a runtime back. Live memory is an error, as in [cpu.Runtime.Close].
func Return(rt *cpu.Runtime) error {
	stats := rt.Stats()
	if stats.LiveBlocks > 0 || stats.Frozen {
		return rt.Close()
	}
	idle.Lock()
	defer idle.Unlock()
	idle.runtimes = append(idle.runtimes, rt)
	return nil
}

// Gradients returns tensors of 100 elements.
func Gradients(t *testing.T, rt runtime.Runtime, count int) []*runtime.Tensor {
	tensors := make([]*runtime.Tensor, count)
	for i := range tensors {
		g, err := runtime.New(rt, dtype.F32, 100)
		require.NoError(t, err)
		tensors[i] = g
	}
	return tensors
}

// Free frees tensors.
func Free(t *testing.T, tensors []*runtime.Tensor) {
	for _, g := range tensors {
		assert.NoError(t, g.Free())
	}
}

// Pointer returns the address of a tensor that the test has not freed.
func Pointer(t *runtime.Tensor) uintptr {
	p, err := t.Ptr()
	if err != nil {
		panic(err)
	}
	return p
}

// normals caches the results of Normal, by n and seed: tests of many configurations use the same.
var normals sync.Map

// Normal returns n normally distributed numbers from a seed, in a new slice.
func Normal(n int, seeds ...int) []float32 {
	var seed uint64
	for _, s := range seeds {
		seed = seed*1_000_003 + uint64(s)
	}
	key := [2]uint64{uint64(n), seed}
	if g, ok := normals.Load(key); ok {
		return slices.Clone(g.([]float32))
	}
	rng := rand.New(rand.NewPCG(seed, 99))
	g := make([]float32, n)
	for i := range g {
		g[i] = float32(rng.NormFloat64())
	}
	if n <= 1<<16 {
		normals.Store(key, slices.Clone(g))
	}
	return g
}

// Bits are the bits of a tensor's F32 elements.
func Bits(t *runtime.Tensor) []uint32 {
	out := make([]uint32, t.Len())
	if err := t.Runtime().CopyOut(hostmem.Bytes(out), Pointer(t)); err != nil {
		panic(err)
	}
	return out
}

// SameBits expects equal bits. Reflection over each element would take longer than the step that made them.
func SameBits(t assert.TestingT, want, got []uint32, messages ...any) {
	if !slices.Equal(want, got) {
		assert.Equal(t, want, got, messages...)
	}
}

var seed = maphash.MakeSeed()

// Digest returns a hash of bits, valid within this process.
func Digest(bits ...[]uint32) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, b := range bits {
		_, _ = h.Write(hostmem.Bytes(b))
	}
	return h.Sum64()
}

// Exhaust freezes a runtime, and allocates all memory that it has for n F32, until the test calls free.
func Exhaust(t *testing.T, rt runtime.Runtime, n int) (free func()) {
	freezer := rt.(runtime.Freezer)
	freezer.Freeze()
	var taken []*runtime.Tensor
	for {
		x, err := runtime.New(rt, dtype.F32, n)
		if err != nil {
			require.ErrorIs(t, err, runtime.ErrFrozen)
			break
		}
		taken = append(taken, x)
	}
	return func() {
		Free(t, taken)
		freezer.Unfreeze()
	}
}

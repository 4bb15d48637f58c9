package cuda

import (
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime"
)

// A kernel of a module that a program loads runs in the order of its stream, also
// in a graph.
func TestModule(t *testing.T) {
	rt := openGPU(t)
	text, err := ptx.ReadFile("kernels/memory.ptx.gz")
	require.NoError(t, err)
	m, err := rt.LoadModule(text)
	require.NoError(t, err)
	k, err := m.Kernel("fill_u64")
	require.NoError(t, err)
	_, err = m.Kernel("absent")
	assert.ErrorContains(t, err, "absent")

	const n = 1000
	p, err := rt.Allocate(8 * n)
	require.NoError(t, err)
	fill := func(value uint64) error {
		return k.Launch(rt.Stream(), Geometry{Grid: Dim{X: 4}, Block: Dim{X: 128}}, uint64(p), n, value)
	}
	read := func() []uint64 {
		got := make([]uint64, n)
		require.NoError(t, rt.CopyOut(hostmem.Bytes(got), p))
		return got
	}
	require.NoError(t, fill(7))
	assert.Equal(t, slices.Repeat([]uint64{7}, n), read())
	g, err := rt.Stream().Capture(func() error { return fill(9) })
	require.NoError(t, err)
	assert.Equal(t, slices.Repeat([]uint64{7}, n), read())
	require.NoError(t, g.Launch(rt.Stream()))
	assert.Equal(t, slices.Repeat([]uint64{9}, n), read())
	race.NoAllocs(t, 100, func() error { return fill(1) })

	assert.ErrorIs(t, k.LaunchWith(rt.Stream(), Geometry{}, make([]byte, maxParameters+1)), runtime.ErrArgument)
	for _, g := range []Geometry{{Grid: Dim{X: 1<<32 + 1}}, {Block: Dim{Y: 1<<32 + 1}}, {Shared: 1<<32 + 1}, {Shared: -1}} {
		assert.ErrorIs(t, k.Launch(rt.Stream(), g, uint64(p), n, 1), runtime.ErrArgument, "%+v", g)
	}
	require.NoError(t, g.Close())
	require.NoError(t, rt.Deallocate(p))
	for range 2 {
		require.NoError(t, m.Close())
	}
	assert.ErrorIs(t, fill(1), runtime.ErrArgument)
	_, err = m.Kernel("fill_u64")
	assert.ErrorIs(t, err, runtime.ErrArgument)
}

// One mapping of shared memory reads what another one writes, also when the first is gone.
func TestSharedMemory(t *testing.T) {
	rt := openGPU(t)
	const n = 1 << 20
	own, err := rt.AllocateShared(n)
	require.NoError(t, err)
	assert.Equal(t, 2<<20, own.Bytes())
	fd, err := own.Export()
	require.NoError(t, err)
	other, err := rt.ImportShared(fd, own.Bytes())
	require.NoError(t, err)
	require.NoError(t, os.NewFile(uintptr(fd), "memory").Close())
	assert.NotEqual(t, own.Address(), other.Address())

	want := make([]byte, n)
	for i := range want {
		want[i] = byte(i * 7)
	}
	require.NoError(t, rt.CopyIn(own.Address(), want))
	for range 2 {
		require.NoError(t, own.Close())
	}
	got := make([]byte, n)
	require.NoError(t, rt.CopyOut(got, other.Address()))
	assert.Equal(t, want, got)

	_, err = own.Export()
	assert.ErrorIs(t, err, runtime.ErrArgument)
	_, err = rt.AllocateShared(0)
	assert.ErrorIs(t, err, runtime.ErrArgument)
	// Close of the runtime frees what is left.
}

package cpu

import (
	goruntime "runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/runtime"
)

func TestReduceOnARuntime(t *testing.T) {
	rt := New()
	a, b, out := []float32{1, 2, 3}, []float32{10, 20, 30}, make([]float32, 3)
	addr := func(s []float32) uintptr { return hostmem.Addr(s) }
	dsts, srcs := []uintptr{addr(out), addr(a)}, []uintptr{addr(a), addr(b)}
	require.NoError(t, rt.Reduce(dsts, srcs, 2, dtype.F32, reductions.Sum))
	goruntime.KeepAlive(b)
	assert.Equal(t, []float32{11, 22, 0}, out)
	assert.Equal(t, []float32{11, 22, 3}, a, "a destination may be a source")
	require.NoError(t, rt.Reduce([]uintptr{0}, []uintptr{0}, 0, dtype.F32, reductions.Sum))

	assert.ErrorIs(t, rt.Reduce(dsts, nil, 2, dtype.F32, reductions.Sum), runtime.ErrArgument)
	assert.ErrorIs(t, rt.Reduce(dsts, srcs, -1, dtype.F32, reductions.Sum), runtime.ErrArgument)
	assert.ErrorIs(t, rt.Reduce(dsts, []uintptr{addr(a), 0}, 2, dtype.F32, reductions.Sum), runtime.ErrArgument)
	assert.ErrorIs(t, rt.Reduce([]uintptr{0}, srcs, 2, dtype.F32, reductions.Sum), runtime.ErrArgument)
	assert.ErrorIs(t, rt.Reduce(dsts, srcs, 2, dtype.I32, reductions.Avg), runtime.ErrDType)
	assert.ErrorIs(t, rt.Reduce(dsts, srcs, 2, dtype.Invalid, reductions.Sum), runtime.ErrDType)
	require.NoError(t, rt.Close())
	assert.ErrorIs(t, rt.Reduce(dsts, srcs, 2, dtype.F32, reductions.Sum), runtime.ErrClosed)
}

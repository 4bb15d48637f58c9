package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// hostMemory is memory that the test frees.
func hostMemory(t *testing.T, bytes int) []byte {
	t.Helper()
	host := cpu.New()
	address, err := host.Allocate(bytes)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, host.Deallocate(address))
		assert.NoError(t, host.Close())
	})
	return hostmem.Slice[byte](address, bytes)
}

// Memory is registered once, and no longer when the window is closed; a runtime that is closed before says that one is
// left.
func TestStandInWindows(t *testing.T) {
	f := openStandIn(t)
	memory := hostMemory(t, 1<<20)
	rt := openRuntime(t, 0)
	before := f.alive()
	for range 3 {
		w, err := rt.OpenWindow(memory)
		require.NoError(t, err)
		assert.Equal(t, 1, f.alive()["registered"])
		require.NoError(t, w.Begin())
		require.NoError(t, w.Close())
		require.NoError(t, w.Close())
		assert.Zero(t, f.alive()["registered"])
		assert.Equal(t, before["streams"], f.alive()["streams"])
	}
	w, err := rt.OpenWindow(memory)
	require.NoError(t, err)
	assert.ErrorIs(t, rt.Close(), runtime.ErrLeak)
	assert.Zero(t, f.alive()["registered"])
	require.NoError(t, w.Close())
	assert.ErrorIs(t, w.Begin(), runtime.ErrClosed)
	_, err = rt.OpenWindow(memory)
	assert.ErrorIs(t, err, runtime.ErrClosed)
}

// A driver that does not register memory is an error, and nothing is left.
func TestStandInWindowsRefused(t *testing.T) {
	f := openStandIn(t)
	memory := hostMemory(t, 1<<20)
	rt := openRuntime(t, 0)
	w, err := rt.OpenWindow(memory) // loads the kernels
	require.NoError(t, err)
	require.NoError(t, w.Close())
	before := f.alive()
	const invalidValue = 1
	for _, call := range []string{"cuMemHostRegister_v2", "cuStreamCreateWithPriority"} {
		f.Fail.Call(hostmem.Addr(append([]byte(call), 0)), invalidValue, 1)
		_, err := rt.OpenWindow(memory)
		require.ErrorContains(t, err, strings.TrimSuffix(call, "_v2"))
		assert.Equal(t, call == "cuMemHostRegister_v2", errors.Is(err, runtime.ErrUnsupported), "%v", err)
		assert.Equal(t, before, f.alive(), call)
	}
	require.NoError(t, rt.Close())
}

// Each kind of work has its own stream. All begin behind the compute stream, reductions wait for their operands, and
// copies out for reductions.
func TestStandInWindowStreams(t *testing.T) {
	f := openStandIn(t)
	memory := hostMemory(t, 1<<20)
	rt := openRuntime(t, 0)
	x, err := rt.Allocate(4096)
	require.NoError(t, err)
	opened, err := rt.OpenWindow(memory)
	require.NoError(t, err)
	w := opened.(*hostWindow)
	waited := func(s, other *Stream) uintptr { return f.Waited.Call(s.Handle(), other.Handle()) }
	submitted := func(s *Stream) uintptr { return f.Submitted.Call(s.Handle()) }
	operands := []uintptr{x, hostmem.Addr(memory)}
	step := func() error {
		return errors.Join(
			w.Begin(),
			w.CopyOut(memory[4096:8192], x),
			w.Reduce(x, operands, 512, dtype.F32, reductions.Sum),
			w.CopyOut(memory[8192:12288], x),
			w.CopyIn(x, memory[:4096]),
			w.Wait())
	}
	for round := range uintptr(3) {
		require.NoError(t, rt.Fill(x, 64, dtype.U8, 1))
		require.NoError(t, step())
		for _, stream := range []*Stream{w.out, w.in, w.add} {
			assert.Equal(t, submitted(rt.Stream()), waited(stream, rt.Stream()))
		}
		assert.Equal(t, round+1, submitted(w.add))
		assert.Equal(t, submitted(w.add), waited(w.out, w.add))
		assert.Equal(t, 2*(round+1), submitted(w.in), "an operand, and a copy that the reduction does not wait for")
		assert.Equal(t, submitted(w.in)-1, waited(w.add, w.in))
		assert.Equal(t, round, waited(w.in, w.add), "the reduction before, which has read another operand")
		assert.Zero(t, waited(w.in, w.out))
	}
	race.NoAllocs(t, 100, step)
	require.NoError(t, w.Close())
	require.NoError(t, rt.Deallocate(x))
	require.NoError(t, rt.Close())
}

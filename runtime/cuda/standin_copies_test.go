package cuda

import (
	"bytes"
	"context"
	"errors"
	goruntime "runtime"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// collect makes the collector free what nobody refers to, and uses that memory.
func collect(size int) (garbage [][]byte) {
	goruntime.GC()
	goruntime.GC()
	for range 200 {
		garbage = append(garbage, bytes.Repeat([]byte{0xff}, size))
	}
	return garbage
}

// Memory of the Go heap that is copied from or to lives until the copy is done,
// whether or not the program still has it, and no longer.
func TestStandInCopiesKeepTheirMemory(t *testing.T) {
	f := openStandIn(t)
	const n, size = 50, 4096
	t.Run("in", func(t *testing.T) {
		rt := openGPU(t)
		in, _ := copyStreams(t, rt)
		p, err := rt.Allocate(n * size)
		require.NoError(t, err)
		f.Hold.Call(1)
		var sources [n]weak.Pointer[byte]
		for i := range n {
			src := bytes.Repeat([]byte{byte(i + 1)}, size)
			sources[i] = weak.Make(&src[0])
			require.NoError(t, rt.CopyInAsync(in, p+uintptr(i*size), src))
		}
		goruntime.KeepAlive(collect(size))
		f.Hold.Call(0)
		got := make([]byte, n*size)
		require.NoError(t, in.Synchronize(context.Background()))
		require.NoError(t, rt.CopyOut(got, p))
		wrong := 0
		for i := range n {
			if !bytes.Equal(bytes.Repeat([]byte{byte(i + 1)}, size), got[i*size:(i+1)*size]) {
				wrong++
			}
		}
		assert.Zero(t, wrong, "wrong copies of %d", n)
		collect(size)
		for i := range n {
			assert.Nil(t, sources[i].Value(), "source %d", i)
		}
		require.NoError(t, rt.Deallocate(p))
	})
	t.Run("out", func(t *testing.T) {
		rt := openGPU(t)
		_, out := copyStreams(t, rt)
		p, err := rt.Allocate(size)
		require.NoError(t, err)
		require.NoError(t, rt.CopyIn(p, bytes.Repeat([]byte{7}, size)))
		f.Hold.Call(1)
		mine := make([]byte, size)
		for range n {
			require.NoError(t, rt.CopyOutAsync(out, make([]byte, size), p))
		}
		require.NoError(t, rt.CopyOutAsync(out, mine, p))
		victims := collect(size)
		f.Hold.Call(0)
		require.NoError(t, out.Synchronize(context.Background()))
		assert.True(t, bytes.Equal(bytes.Repeat([]byte{7}, size), mine))
		wrong := 0
		for _, v := range victims {
			if !bytes.Equal(bytes.Repeat([]byte{0xff}, size), v) {
				wrong++
			}
		}
		assert.Zero(t, wrong, "memories of somebody else that were written to")
		require.NoError(t, rt.Deallocate(p))
	})
}

// While many copies are pending, those that are done give their memory free
// without anybody waiting for a stream.
func TestStandInManyCopies(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	before := f.alive()["events"]
	p, err := rt.Allocate(8)
	require.NoError(t, err)
	in, err := rt.CopyInStream()
	require.NoError(t, err)
	for range 1000 {
		require.NoError(t, rt.CopyInAsync(in, p, make([]byte, 8)))
	}
	assert.LessOrEqual(t, f.alive()["events"]-before, 2*fewCopies, "each pending copy has an event")
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
	assert.Empty(t, f.alive())
}

// A captured copy runs as often as its graph does, so only memory with an end that the program sets will do.
func TestStandInCapturesWantPinnedMemory(t *testing.T) {
	openStandIn(t)
	rt := openGPU(t)
	p, err := rt.Allocate(8)
	require.NoError(t, err)
	host := pinned(t, rt, 16)
	copy(host[8:], "pinned!!")
	_, err = rt.Stream().Capture(func() error { return rt.CopyInAsync(rt.Stream(), p, make([]byte, 8)) })
	require.ErrorIs(t, err, runtime.ErrArgument)
	assert.ErrorContains(t, err, "AllocatePinned")
	g, err := rt.Stream().Capture(func() error { return rt.CopyInAsync(rt.Stream(), p, host[8:]) })
	require.NoError(t, err)
	require.NoError(t, g.Launch(rt.Stream()))
	got := make([]byte, 8)
	require.NoError(t, rt.CopyOut(got, p))
	assert.Equal(t, "pinned!!", string(got))
	require.NoError(t, g.Close())
	require.NoError(t, rt.Deallocate(p))
}

// The driver takes a copy of memory that it stages when it can do it, which may be late.
// Nobody else waits for that.
func TestStandInCopyThatTakesLong(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	in, err := rt.CopyInStream()
	require.NoError(t, err)
	p, err := rt.Allocate(8)
	require.NoError(t, err)
	begun, end, ended := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() {
		ended <- rt.copyAsync(in, make([]byte, 8), func() error {
			close(begun)
			<-end
			return nil
		})
	}()
	<-begun
	others := make(chan error)
	go func() {
		err := rt.CopyInAsync(rt.Stream(), p, make([]byte, 8))
		_, asked := rt.Stream().Done()
		others <- errors.Join(err, asked)
	}()
	select {
	case err := <-others:
		assert.NoError(t, err)
		assert.False(t, rt.idle(), "but Close does")
	case <-time.After(time.Minute):
		t.Error("others wait")
	}
	close(end)
	require.NoError(t, <-ended)
	require.NoError(t, in.Synchronize(context.Background()))
	assert.True(t, rt.idle())
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
	assert.Empty(t, f.alive())
}

// Close waits for a copy on somebody else's stream.
func TestStandInCloseWaitsForCopies(t *testing.T) {
	f := openStandIn(t)
	other, rt := openRuntime(t, 0), openRuntime(t, 0)
	s, err := other.NewStream(0)
	require.NoError(t, err)
	p, err := other.Allocate(8)
	require.NoError(t, err)
	f.Stall.Call(s.Handle(), 1)
	require.NoError(t, rt.CopyInAsync(rt.WrapStream(s.Handle()), p, make([]byte, 8)))
	require.False(t, rt.idle())
	f.Stall.Call(s.Handle(), 0)
	require.True(t, rt.idle())
	require.NoError(t, rt.Close())
	require.NoError(t, other.Deallocate(p))
	require.NoError(t, other.Close())
	assert.Empty(t, f.alive())
}

// Memory of which nothing will tell that the copy is done stays for good.
func TestStandInCopyThatCannotBeMarked(t *testing.T) {
	f := openStandIn(t)
	rt := openRuntime(t, 0)
	in, err := rt.CopyInStream()
	require.NoError(t, err)
	p, err := rt.Allocate(8)
	require.NoError(t, err)
	f.Stall.Call(in.Handle(), 1)
	src, record := make([]byte, 8), append([]byte("cuEventRecord"), 0)
	source := weak.Make(&src[0])
	f.Fail.Call(hostmem.Addr(record), 400, 1)
	require.ErrorContains(t, rt.CopyInAsync(in, p, src), "cuEventRecord")
	goruntime.KeepAlive(record)
	require.NoError(t, rt.CopyInAsync(rt.Stream(), p, make([]byte, 8)))
	require.NoError(t, rt.Synchronize(context.Background()), "which looks which copies are done")
	collect(8)
	assert.NotNil(t, source.Value())
	f.Stall.Call(in.Handle(), 0)
	require.NoError(t, rt.Deallocate(p))
	require.NoError(t, rt.Close())
	assert.Empty(t, f.alive())
}

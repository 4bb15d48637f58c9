package cuda

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime"
)

// openGPU opens GPU 0, or skips the test on a machine without one.
func openGPU(t testing.TB) *Runtime {
	t.Helper()
	if _, err := Count(); errors.Is(err, runtime.ErrUnavailable) {
		t.Skipf("needs an NVIDIA GPU and its driver: %v", err)
	}
	rt, err := Open(0)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	return rt
}

func TestDevices(t *testing.T) {
	openGPU(t)
	devices, err := Devices()
	require.NoError(t, err)
	for _, d := range devices {
		t.Logf("%+v", d)
		assert.NotEmpty(t, d.Name)
		assert.Greater(t, d.MemoryBytes, int64(1<<30))
		assert.GreaterOrEqual(t, d.Major, 7)
		assert.False(t, d.Peers[d.Index], "a device is not its own peer")
	}
	major, _, err := DriverVersion()
	require.NoError(t, err)
	assert.GreaterOrEqual(t, major, 11)
}

func TestWithoutAGPU(t *testing.T) {
	_, err := Count()
	if err == nil {
		t.Skip("this machine has a GPU")
	}
	assert.ErrorIs(t, err, runtime.ErrUnavailable)
	_, err = Open(0)
	assert.ErrorIs(t, err, runtime.ErrUnavailable)
	assert.ErrorContains(t, err, "cuda")
}

func TestOpenOfAGPUThatIsNotThere(t *testing.T) {
	openGPU(t)
	for _, index := range []int{-1, 1000} {
		_, err := Open(index)
		assert.ErrorIs(t, err, runtime.ErrArgument)
	}
}

func TestEventsMeasureAndOrder(t *testing.T) {
	rt := openGPU(t)
	const n = 64 << 20
	p, err := rt.Allocate(n)
	require.NoError(t, err)
	defer rt.Deallocate(p) //nolint:errcheck

	start, err := rt.NewTimingEvent()
	require.NoError(t, err)
	defer start.Close() //nolint:errcheck
	end, err := rt.NewTimingEvent()
	require.NoError(t, err)
	defer end.Close() //nolint:errcheck
	other, err := rt.NewStream(0)
	require.NoError(t, err)
	defer other.Close() //nolint:errcheck

	require.NoError(t, rt.Stream().Record(start))
	require.NoError(t, rt.Fill(p, n, dtype.U8, 7))
	require.NoError(t, rt.Stream().Record(end))
	require.NoError(t, other.Wait(end))
	pinned, err := rt.AllocatePinned(n)
	require.NoError(t, err)
	defer rt.FreePinned(pinned) //nolint:errcheck
	require.NoError(t, rt.CopyOutAsync(other, pinned, p))
	require.NoError(t, other.Synchronize(context.Background()))
	for i, b := range pinned {
		if b != 7 {
			t.Fatalf("byte %d is %d: the copy did not wait for the fill", i, b)
		}
	}
	d, err := end.Since(start)
	require.NoError(t, err)
	assert.Positive(t, d)
	assert.Less(t, d, time.Second)
}

func TestGraphReplaysWhatWasCaptured(t *testing.T) {
	rt := openGPU(t)
	const n = 1000
	p, err := rt.Allocate(n * 4)
	require.NoError(t, err)
	defer rt.Deallocate(p) //nolint:errcheck
	require.NoError(t, rt.Fill(p, n, dtype.F32, 1))
	kernels := rt.Kernels() // which allocates
	graph, err := rt.Stream().Capture(func() error {
		_, err := rt.Allocate(1 << 30)
		assert.ErrorIs(t, err, runtime.ErrFrozen)
		return kernels.Store(p, dtype.F32, p, n, 2, 0)
	})
	require.NoError(t, err)
	defer graph.Close() //nolint:errcheck
	for range 5 {
		require.NoError(t, graph.Launch(rt.Stream()))
	}
	out := make([]float32, n)
	require.NoError(t, rt.CopyOut(hostmem.Bytes(out), p))
	for i, v := range out {
		if v != 32 {
			t.Fatalf("element %d is %v after five doublings of 1", i, v)
		}
	}
}

func TestOutOfMemoryIsTyped(t *testing.T) {
	rt := openGPU(t)
	_, err := rt.Allocate(1 << 50)
	assert.ErrorIs(t, err, runtime.ErrOutOfMemory)
	p, err := rt.Allocate(1 << 20)
	require.NoError(t, err, "the runtime goes on")
	require.NoError(t, rt.Deallocate(p))
}

func TestACanceledContextEndsTheWait(t *testing.T) {
	rt := openGPU(t)
	p, err := rt.Allocate(1 << 30)
	require.NoError(t, err)
	defer rt.Deallocate(p) //nolint:errcheck
	for i := range 200 {   // some tens of milliseconds of work
		require.NoError(t, rt.Fill(p, 1<<30, dtype.U8, float64(i%100)))
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	assert.ErrorIs(t, rt.Synchronize(ctx), context.Canceled)
	require.NoError(t, rt.Synchronize(context.Background()))
}

func TestPointersAreRecognised(t *testing.T) {
	rt := openGPU(t)
	p, err := rt.Allocate(4 << 20)
	require.NoError(t, err)
	defer rt.Deallocate(p) //nolint:errcheck
	own, err := rt.WrapTensor(p+1024, dtype.F32, []int{3, 4}, nil, nil)
	require.NoError(t, err)
	require.NoError(t, own.Fill(1))
	for what, ptr := range map[string]uintptr{
		"page-locked memory of the host": hostmem.Addr(pinned(t, rt, 100)),
		"no memory that the driver":      hostmem.Addr(make([]byte, 100)),
	} {
		_, err := rt.WrapTensor(ptr, dtype.U8, []int{10}, nil, nil)
		require.ErrorIs(t, err, runtime.ErrDevice, what)
		assert.ErrorContains(t, err, what)
	}
}

func TestAdoptedComputeStream(t *testing.T) {
	rt := openGPU(t)
	own, err := rt.NewStream(0)
	require.NoError(t, err)
	for _, handle := range []uintptr{0, streamLegacy, own.Handle()} {
		adopting, err := Open(0, WithComputeStream(handle))
		require.NoError(t, err)
		p, err := adopting.Allocate(8)
		require.NoError(t, err)
		require.NoError(t, adopting.Fill(p, 1, dtype.F64, 1.5))
		out := make([]float64, 1)
		require.NoError(t, adopting.CopyOut(hostmem.Bytes(out), p))
		assert.Equal(t, 1.5, out[0])
		require.NoError(t, adopting.Deallocate(p))
		require.NoError(t, adopting.Close())
	}
	require.NoError(t, own.Close(), "it outlived the runtime that adopted it")
	_, err = Open(0, WithComputeStream(streamPerThread))
	assert.ErrorIs(t, err, runtime.ErrArgument)
}

func TestClosingAfterTheRuntime(t *testing.T) {
	openGPU(t)
	rt, err := Open(0)
	require.NoError(t, err)
	stream, err := rt.NewStream(0)
	require.NoError(t, err)
	event, err := rt.NewEvent()
	require.NoError(t, err)
	graph, err := stream.Capture(func() error { return stream.Record(event) })
	require.NoError(t, err)
	require.NoError(t, rt.Close())
	for range 2 {
		assert.NoError(t, stream.Close())
		assert.NoError(t, event.Close())
		assert.NoError(t, graph.Close())
	}
	assert.ErrorIs(t, stream.Record(event), runtime.ErrClosed)
	assert.ErrorIs(t, rt.Current(func() error { return nil }), runtime.ErrClosed)
}

func TestHotPathsDoNotAllocate(t *testing.T) {
	rt := openGPU(t)
	p, err := rt.Allocate(4096)
	require.NoError(t, err)
	defer rt.Deallocate(p) //nolint:errcheck
	event, err := rt.NewEvent()
	require.NoError(t, err)
	defer event.Close() //nolint:errcheck
	for name, f := range map[string]func() error{
		"allocate": func() error {
			q, err := rt.Allocate(1 << 16)
			return errors.Join(err, rt.Deallocate(q))
		},
		"launch": func() error { return rt.Kernels().Store(p, dtype.F32, p, 1024, 1, 0) },
		"record": func() error { return rt.Stream().Record(event) },
		"wait":   func() error { return rt.Stream().Wait(event) },
		"query":  func() error { _, err := event.Done(); return err },
	} {
		race.NoAllocs(t, 200, f, name)
	}
}

func BenchmarkAllocate(b *testing.B) {
	rt := openGPU(b)
	b.ReportAllocs()
	for b.Loop() {
		p, err := rt.Allocate(1 << 16)
		if err != nil {
			b.Fatal(err)
		}
		if err := rt.Deallocate(p); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLaunch(b *testing.B) {
	rt := openGPU(b)
	p, err := rt.Allocate(4096)
	require.NoError(b, err)
	defer rt.Deallocate(p) //nolint:errcheck
	b.ReportAllocs()
	for b.Loop() {
		if err := rt.Kernels().Store(p, dtype.F32, p, 1024, 1, 0); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkBandwidth times kernels over 1 GiB on the device's own clock.
func BenchmarkBandwidth(b *testing.B) {
	rt := openGPU(b)
	const bytes = 1 << 30
	p, err := rt.Allocate(bytes)
	require.NoError(b, err)
	defer rt.Deallocate(p) //nolint:errcheck
	q, err := rt.Allocate(bytes)
	require.NoError(b, err)
	defer rt.Deallocate(q) //nolint:errcheck
	rows, columns := 1<<14, bytes/4>>14
	for _, c := range []struct {
		name  string
		moved int64
		run   func() error
	}{
		{"copy", 2 * bytes, func() error { return rt.Copy(q, p, bytes) }},
		{"fill-u64", bytes, func() error { return rt.Fill(p, bytes/8, dtype.F64, 1) }},
		{"store-f32", 2 * bytes, func() error { return rt.Kernels().Store(p, dtype.F32, p, bytes/4, 1, 0) }},
		{"transpose-f32", 2 * bytes, func() error {
			return rt.CopyStrided(q, []int{columns, 1}, p, []int{1, rows}, []int{rows, columns}, 4)
		}},
		{"transpose-bf16", 2 * bytes, func() error {
			return rt.CopyStrided(q, []int{2 * columns, 1}, p, []int{1, rows}, []int{rows, 2 * columns}, 2)
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			start, err := rt.NewTimingEvent()
			require.NoError(b, err)
			end, err := rt.NewTimingEvent()
			require.NoError(b, err)
			require.NoError(b, c.run())
			require.NoError(b, rt.Stream().Record(start))
			for range b.N {
				require.NoError(b, c.run())
			}
			require.NoError(b, rt.Stream().Record(end))
			require.NoError(b, rt.Synchronize(context.Background()))
			d, err := end.Since(start)
			require.NoError(b, err)
			b.ReportMetric(float64(c.moved)*float64(b.N)/float64(d.Nanoseconds()), "GB/s")
		})
	}
}

// Released mappings return to the driver at once, in spite of work in flight.
func TestReleasedMappingsGoBackToTheDriver(t *testing.T) {
	rt := openGPU(t)
	bytes := int64(512 << 20)
	if os.Getenv(standInVariable) != "" {
		bytes = 8 << 20 // its fills are done at the call
	}
	before, _, err := rt.MemoryInfo()
	require.NoError(t, err)
	p, err := rt.AllocateMapping(int(bytes))
	require.NoError(t, err)
	for range 20 {
		require.NoError(t, rt.Fill(p, int(bytes), dtype.U8, 1))
	}
	require.NoError(t, rt.ReleaseMapping(p))
	assert.ErrorIs(t, rt.Deallocate(p), runtime.ErrForeignPointer)
	after, _, err := rt.MemoryInfo()
	require.NoError(t, err)
	assert.Greater(t, after, before-bytes/2)
	assert.NoError(t, rt.Synchronize(context.Background()), "nothing used it any more")
}

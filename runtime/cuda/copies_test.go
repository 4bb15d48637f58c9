package cuda

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// pinned returns page-locked memory for the length of a test.
func pinned(t testing.TB, rt *Runtime, bytes int) []byte {
	t.Helper()
	b, err := rt.AllocatePinned(bytes)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.FreePinned(b)) })
	return b
}

// copyStreams returns both copy streams of a runtime.
func copyStreams(t testing.TB, rt *Runtime) (in, out *Stream) {
	t.Helper()
	in, err := rt.CopyInStream()
	require.NoError(t, err)
	out, err = rt.CopyOutStream()
	require.NoError(t, err)
	return in, out
}

// TestCopyStreamsInAPipeline sends chunks through two buffers: while one is
// computed on, the next chunk comes in and the one before goes out. Only events
// keep them apart.
func TestCopyStreamsInAPipeline(t *testing.T) {
	rt := openGPU(t)
	const chunks, n = 12, 1 << 20 // elements of 4 bytes
	in, out := copyStreams(t, rt)
	compute := rt.Stream()
	source, sink := pinned(t, rt, chunks*n*4), pinned(t, rt, chunks*n*4)
	values := hostmem.Slice[float32](hostmem.Addr(source), chunks*n)
	for i := range values {
		values[i] = float32(i % 8191)
	}
	buffers := make([]uintptr, 2)
	for i := range buffers {
		var err error
		buffers[i], err = rt.Allocate(n * 4)
		require.NoError(t, err)
	}
	for c := range chunks {
		p, from, to := buffers[c%2], c*n*4, (c+1)*n*4
		require.NoError(t, in.WaitFor(out)) // the buffer's last chunk has left
		if c == 0 {
			require.NoError(t, in.WaitFor(compute)) // fresh memory
		}
		require.NoError(t, rt.CopyInAsync(in, p, source[from:to]))
		require.NoError(t, compute.WaitFor(in))
		for range 3 {
			require.NoError(t, rt.Kernels().Store(p, dtype.F32, p, n, 2, 0))
		}
		require.NoError(t, out.WaitFor(compute))
		require.NoError(t, rt.CopyOutAsync(out, sink[from:to], p))
	}
	require.NoError(t, compute.WaitFor(out))
	for _, p := range buffers {
		require.NoError(t, rt.Deallocate(p))
	}
	require.NoError(t, out.Synchronize(context.Background()))
	for i, v := range hostmem.Slice[float32](hostmem.Addr(sink), chunks*n) {
		if v != 8*values[i] {
			t.Fatalf("element %d of chunk %d is %v, not 8 * %v", i%n, i/n, v, values[i])
		}
	}
}

// BenchmarkCopyStreams copies 256 MiB in, out, and both at once.
func BenchmarkCopyStreams(b *testing.B) {
	rt := openGPU(b)
	const bytes = 256 << 20
	in, out := copyStreams(b, rt)
	host := pinned(b, rt, 2*bytes)
	p, err := rt.Allocate(2 * bytes)
	require.NoError(b, err)
	defer rt.Deallocate(p) //nolint:errcheck
	copyIn := func() error { return rt.CopyInAsync(in, p, host[:bytes]) }
	copyOut := func() error { return rt.CopyOutAsync(out, host[bytes:], p+bytes) }
	for _, c := range []struct {
		name   string
		copies []func() error
	}{
		{"in", []func() error{copyIn}},
		{"out", []func() error{copyOut}},
		{"both", []func() error{copyIn, copyOut}},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(bytes * len(c.copies)))
			for b.Loop() {
				for _, submit := range c.copies {
					require.NoError(b, submit())
				}
				require.NoError(b, in.Synchronize(context.Background()))
				require.NoError(b, out.Synchronize(context.Background()))
			}
		})
	}
}

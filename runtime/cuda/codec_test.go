package cuda

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// BenchmarkCodec times the codecs on the device's own clock: lists of 1 % of 33,554,432 elements, and
// arrays of 26,214,400.
func BenchmarkCodec(b *testing.B) {
	const n, dense, seed = 1 << 25, 26_214_400, 46
	rt, rng := openGPU(b), rand.New(rand.NewPCG(seed, 0))
	values := make([]float32, n)
	for i := range values {
		values[i] = float32(rng.NormFloat64())
	}
	var p [3]uintptr
	for i := range p {
		var err error
		p[i], err = rt.Allocate(4 * n)
		require.NoError(b, err)
		defer rt.Deallocate(p[i]) //nolint:errcheck
	}
	x, y, code := p[0], p[1], p[2]
	k := rt.Kernels()
	list := kernel.Entries{Idx: y, Val: y + 16<<20, N: n / 100}
	out := kernel.Entries{Idx: y + 32<<20, Val: y + 48<<20, N: n / 50, Len: y + 100<<20}
	upload := func() {
		require.NoError(b, rt.CopyIn(x, hostmem.Bytes(values)))
		require.NoError(b, k.TopK(kernel.Source{X: x, N: n}, n/100, list, 0))
	}
	upload()
	type test struct {
		name string
		run  func() error
	}
	tests := []test{
		{"chunks", func() error { return k.TopKChunks(kernel.Source{X: x, N: n}, 64, 4096, out) }},
		{"chunks of a sum", func() error {
			return k.TopKChunks(kernel.Source{X: code, Grad: x, DType: dtype.F32, N: n, Take: true}, 64, 4096, out)
		}},
	}
	for c := kernel.CodecPositions; c.Encodes(); c++ {
		message := kernel.Message{Ptr: code, Bytes: c.Bound(n/100, n)}
		tests = append(tests,
			test{fmt.Sprintf("encode/%v", c), func() error { return k.Encode(list, c, n, message, kernel.Array{Ptr: x, N: n}) }},
			test{fmt.Sprintf("decode/%v", c), func() error { return k.Decode(message, c, out) }})
	}
	tests = append(tests, test{"copy", func() error { return rt.Copy(y, x, 4*dense) }})
	for c := kernel.CodecF32; c.Quantizes(); c++ {
		tests = append(tests,
			test{fmt.Sprintf("quantize/%v", c), func() error { return k.Quantize(code, c, x, dense, 0) }},
			test{fmt.Sprintf("quantize with a residual/%v", c), func() error { return k.Quantize(code, c, x, dense, y) }},
			test{fmt.Sprintf("dequantize and add/%v", c), func() error { return k.Dequantize(y, c, code, dense, true) }})
	}
	for _, c := range tests {
		b.Run(c.name, func(b *testing.B) { deviceTime(b, rt, c.run) })
	}
}

// deviceTime times a call on the device's own clock.
func deviceTime(b *testing.B, rt *Runtime, call func() error) {
	start, err := rt.NewTimingEvent()
	require.NoError(b, err)
	end, err := rt.NewTimingEvent()
	require.NoError(b, err)
	require.NoError(b, call())
	require.NoError(b, rt.Stream().Record(start))
	for b.Loop() {
		require.NoError(b, call())
	}
	require.NoError(b, rt.Stream().Record(end))
	require.NoError(b, end.Synchronize(context.Background()))
	took, err := end.Since(start)
	require.NoError(b, err)
	b.ReportMetric(float64(took.Nanoseconds())/float64(b.N)/1e3, "device-us/op")
	require.NoError(b, start.Close())
	require.NoError(b, end.Close())
}

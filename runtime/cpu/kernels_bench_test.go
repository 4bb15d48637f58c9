package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
)

// benchmarkLength is the size of a 100 MiB gradient, at which published top-k
// implementations are compared.
const benchmarkLength = 26_214_400

// BenchmarkMemory is the floor of the others: copying, and reading (CountAbove
// does next to nothing else) benchmarkLength float32.
func BenchmarkMemory(b *testing.B) {
	w := newWorkbench(b)
	x, y := room[float32](w, benchmarkLength), room[float32](w, benchmarkLength)
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(2 * 4 * benchmarkLength)
		for b.Loop() {
			require.NoError(b, w.Copy(y, x, 4*benchmarkLength))
		}
	})
	b.Run("read", func(b *testing.B) {
		b.SetBytes(4 * benchmarkLength)
		for b.Loop() {
			_, err := w.CountAbove(x, benchmarkLength, 1)
			require.NoError(b, err)
		}
	})
}

// BenchmarkTopK selects 1 % (and other shares) of arrays that are easy and hard.
func BenchmarkTopK(b *testing.B) {
	const seed = 31
	w := newWorkbench(b)
	for _, test := range []struct {
		input string
		n, k  int
	}{
		{"normal", 10_000, 100},
		{"normal", 100_000, 1000},
		{"normal", 1 << 20, 1 << 20 / 100},
		{"normal", benchmarkLength, benchmarkLength / 1000},
		{"normal", benchmarkLength, benchmarkLength / 100},
		{"normal", benchmarkLength, benchmarkLength / 10},
		{"normal", benchmarkLength, benchmarkLength / 2},
		{"wide range", benchmarkLength, benchmarkLength / 100},
		{"mostly zero", benchmarkLength, benchmarkLength / 100},
		{"few values", benchmarkLength, benchmarkLength / 100},
		{"equal", benchmarkLength, benchmarkLength / 100},
		{"ascending", benchmarkLength, benchmarkLength / 100},
		{"adjacent keys", benchmarkLength, benchmarkLength / 100},
		{"any bits", benchmarkLength, benchmarkLength / 100},
	} {
		b.Run(fmt.Sprintf("%s/n=%d/k=%d", test.input, test.n, test.k), func(b *testing.B) {
			rng := rand.New(rand.NewPCG(seed, 0))
			x, err := w.Allocate(4 * test.n)
			require.NoError(b, err)
			for _, input := range topKInputs {
				if input.name == test.input {
					fillWith(floats(x, test.n), func(i int) float32 { return input.at(rng, i, test.n) })
				}
			}
			idx, val := room[int32](w, test.k), room[float32](w, test.k)
			b.SetBytes(4 * int64(test.n))
			b.ReportAllocs()
			for b.Loop() {
				_, _, err := w.TopK(x, test.n, test.k, idx, val)
				require.NoError(b, err)
			}
			require.NoError(b, w.Deallocate(x))
			require.NoError(b, w.Deallocate(idx))
			require.NoError(b, w.Deallocate(val))
		})
	}
}

func fillWith(x []float32, at func(i int) float32) {
	for i := range x {
		x[i] = at(i)
	}
}

// BenchmarkKernels runs the others on normal values, sparse ones with 1 % of
// the indices. Bytes are those read and written, for sparse accesses the
// elements and not the cache lines around them.
func BenchmarkKernels(b *testing.B) {
	const n, k, seed = benchmarkLength, benchmarkLength / 100, 32
	w := newWorkbench(b)
	rng := rand.New(rand.NewPCG(seed, 0))
	x, y := put(w, normals(rng, n)), room[float32](w, n)
	half := room[uint16](w, n)
	threshold := float32(2.5758293) // 1 % of a normal distribution
	idx, val := room[int32](w, 2*k), room[float32](w, 2*k)
	idxB, valB := room[int32](w, 2*k), room[float32](w, 2*k)
	idxOut, valOut := room[int32](w, 4*k), room[float32](w, 4*k)
	m, err := w.Select(x, n, threshold, idx, val, 2*k)
	require.NoError(b, err)
	for i, v := range floats(x, n) {
		floats(y, n)[n-1-i] = v
	}
	mb, err := w.Select(y, n, threshold, idxB, valB, 2*k)
	require.NoError(b, err)

	for _, test := range []struct {
		name  string
		bytes int
		run   func() error
	}{
		{"Select 1%", 4*n + 8*m, func() error { _, err := w.Select(x, n, threshold, idxOut, valOut, 2*k); return err }},
		{"Select 10%", 4*n + 80*m, func() error { _, err := w.Select(x, n, 1.6448536, y, half, n/8); return err }},
		{"CountAbove", 4 * n, func() error { _, err := w.CountAbove(x, n, threshold); return err }},
		{"MeanStd", 4 * n, func() error { _, _, err := w.MeanStd(x, n); return err }},
		{"SumSquares", 4 * n, func() error { _, err := w.SumSquares(x, n); return err }},
		{"Accumulate f32", 12 * n, func() error { return w.Accumulate(y, x, n, dtype.F32) }},
		{"Accumulate f16", 10 * n, func() error { return w.Accumulate(y, half, n, dtype.F16) }},
		{"Accumulate bf16", 10 * n, func() error { return w.Accumulate(y, half, n, dtype.BF16) }},
		{"Store f32", 8 * n, func() error { return w.Store(y, dtype.F32, x, n, 0.5) }},
		{"Store f16", 6 * n, func() error { return w.Store(half, dtype.F16, x, n, 0.5) }},
		{"Store bf16", 6 * n, func() error { return w.Store(half, dtype.BF16, x, n, 0.5) }},
		{"Scale", 8 * n, func() error { return w.Scale(y, n, -1) }},
		{"ScatterAdd", 16 * m, func() error { return w.ScatterAdd(y, n, idx, val, m) }},
		{"ScatterSet", 12 * m, func() error { return w.ScatterSet(y, n, idx, val, m) }},
		{"Gather", 12 * m, func() error { return w.Gather(y, n, idx, m, valOut) }},
		{"ZeroAt", 8 * m, func() error { return w.ZeroAt(y, n, idx, m) }},
		{"OffsetIndices", 8 * m, func() error { return w.OffsetIndices(idx, m, 0) }},
		{"MergeAdd", 16 * (m + mb), func() error { _, err := w.MergeAdd(idx, val, m, idxB, valB, mb, idxOut, valOut); return err }},
		{"LowerBounds", 0, func() error {
			return w.LowerBounds(idx, m, []int32{n / 4, n / 2, 3 * n / 4, math.MaxInt32}, make([]int, 4))
		}},
	} {
		b.Run(test.name, func(b *testing.B) {
			b.SetBytes(int64(test.bytes))
			b.ReportAllocs()
			for b.Loop() {
				require.NoError(b, test.run())
			}
		})
	}
}

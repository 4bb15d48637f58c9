package cpu

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// benchmarkLength is the size of a 100 MiB gradient, at which published top-k
// implementations are compared.
const benchmarkLength = 26_214_400

// workbench is a runtime with helpers that put Go slices into its memory.
type workbench struct {
	testing.TB
	*Runtime
	kernel.Kernels
}

func newWorkbench(t testing.TB) workbench {
	rt := New()
	t.Cleanup(func() { _ = rt.Close() }) // what is live is part of the test
	return workbench{t, rt, rt.Kernels()}
}

// put copies s into memory of the runtime.
func put[T any](w workbench, s ...T) uintptr {
	w.Helper()
	p, err := w.Allocate(len(hostmem.Bytes(s)))
	require.NoError(w, err)
	require.NoError(w, w.CopyIn(p, hostmem.Bytes(s)))
	return p
}

// room allocates n elements.
func room[T any](w workbench, n int) uintptr { return put(w, make([]T, n)...) }

// list puts entries into memory of the runtime; at least n fit.
func (w workbench) list(e entries, n int) kernel.Entries {
	n = max(n, len(e.idx))
	return kernel.Entries{
		Idx: put(w, append(e.idx, make([]int32, n-len(e.idx))...)...),
		Val: put(w, append(e.val, make([]float32, n-len(e.idx))...)...),
		N:   n, Len: put(w, int32(len(e.idx))),
	}
}

func normals(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	return x
}

// ascending returns about m entries of n, with normal values.
func ascending(rng *rand.Rand, n, m int) (e entries) {
	for i := range n {
		if rng.IntN(n) < m {
			e.idx = append(e.idx, int32(i))
		}
	}
	e.val = normals(rng, len(e.idx))
	return e
}

func measure(b *testing.B, run func() error) {
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, run())
	}
}

// BenchmarkMemory is the floor of the others: copying, and reading (CountAbove
// does next to nothing else) benchmarkLength float32.
func BenchmarkMemory(b *testing.B) {
	w := newWorkbench(b)
	x, y := room[float32](w, benchmarkLength), room[float32](w, benchmarkLength)
	threshold, count := put(w, float32(1)), room[int32](w, 1)
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(2 * 4 * benchmarkLength)
		for b.Loop() {
			require.NoError(b, w.Copy(y, x, 4*benchmarkLength))
		}
	})
	b.Run("read", func(b *testing.B) {
		b.SetBytes(4 * benchmarkLength)
		for b.Loop() {
			require.NoError(b, w.CountAbove(kernel.Entries{Val: x, N: benchmarkLength}, threshold, 1, count))
		}
	})
}

// BenchmarkTopK selects 1 % (and other shares) of arrays that are easy and hard,
// without a guess.
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
			dst := kernel.Entries{Idx: room[int32](w, test.k), Val: room[float32](w, test.k), N: test.k}
			b.SetBytes(4 * int64(test.n))
			measure(b, func() error { return w.TopK(kernel.Source{X: x, N: test.n}, test.k, dst, 0) })
			for _, p := range []uintptr{x, dst.Idx, dst.Val} {
				require.NoError(b, w.Deallocate(p))
			}
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
	x, y := put(w, normals(rng, n)...), room[float32](w, n)
	half := room[uint16](w, n)
	one, tenth := put(w, float32(2.5758293)), put(w, float32(1.6448536)) // 1 % and 10 % of a normal distribution
	list, other := w.list(ascending(rng, n, k), 2*k), w.list(ascending(rng, n, k), 2*k)
	out := w.list(entries{}, 4*k)
	m, mb := int(hostmem.Slice[int32](list.Len, 1)[0]), int(hostmem.Slice[int32](other.Len, 1)[0])
	dense := func(p uintptr) kernel.Source { return kernel.Source{X: p, N: n} }
	grad := func(p uintptr, dt dtype.DType) kernel.Source {
		return kernel.Source{X: y, N: n, Grad: p, DType: dt}
	}
	both := []kernel.Entries{list, other}
	array, minus := kernel.Array{Ptr: y, N: n}, put(w, float32(-1))
	number, bounds := room[float64](w, 1), put[int32](w, 0, n/4, n/2, n)

	for _, test := range []struct {
		name  string
		bytes int
		run   func() error
	}{
		{"Select 1%", 4*n + 8*m, func() error { return w.Select(dense(x), one, out) }},
		{"Select 10%", 4*n + 80*m, func() error {
			return w.Select(dense(x), tenth, kernel.Entries{Idx: y, Val: half, N: n / 8})
		}},
		{"CountAbove", 4 * n, func() error { return w.CountAbove(kernel.Entries{Val: x, N: n}, one, 1, number) }},
		{"Fit", 4 * n, func() error { return w.Fit(dense(x), 2, number) }},
		{"SumSquares", 4 * n, func() error { return w.SumSquares(x, dtype.F32, n, number) }},
		{"Accumulate f32", 12 * n, func() error { return w.Accumulate(grad(x, dtype.F32)) }},
		{"Accumulate f16", 10 * n, func() error { return w.Accumulate(grad(half, dtype.F16)) }},
		{"Accumulate bf16", 10 * n, func() error { return w.Accumulate(grad(half, dtype.BF16)) }},
		{"Store f32", 8 * n, func() error { return w.Store(y, dtype.F32, x, n, 0.5, 0) }},
		{"Store f16", 6 * n, func() error { return w.Store(half, dtype.F16, x, n, 0.5, 0) }},
		{"Store bf16", 6 * n, func() error { return w.Store(half, dtype.BF16, x, n, 0.5, 0) }},
		{"Scale", 8 * n, func() error { return w.Scale(y, dtype.F32, n, minus) }},
		{"ScatterAdd", 16 * m, func() error { return w.ScatterAdd(array, list, 0.5) }},
		{"ScatterZero", 8 * m, func() error { return w.ScatterZero(array, list) }},
		{"Restore", 16 * m, func() error { return w.Restore(array, list, other) }},
		{"Union", 16 * (m + mb), func() error { return w.Union(out, n, both, 1, 0, 0) }},
		{"Merge", 4*n + 8*(m+mb), func() error { return w.Merge(y, dtype.F32, n, both, 0.5, 0, 0, kernel.Restoration{}) }},
		{"Merge bf16", 2*n + 8*(m+mb), func() error { return w.Merge(half, dtype.BF16, n, both, 0.5, 0, 0, kernel.Restoration{}) }},
		{"LowerBounds", 0, func() error { return w.LowerBounds(list, bounds, 4, number, 0) }},
	} {
		b.Run(test.name, func(b *testing.B) {
			b.SetBytes(int64(test.bytes))
			measure(b, test.run)
		})
	}
}

// BenchmarkStep does what one step of a sparse pattern asks of the kernels, at
// 1 %: the gradient is added to the residual, and what is selected is removed
// from it; lists of two ranks become a dense result.
func BenchmarkStep(b *testing.B) {
	const seed = 33
	for _, n := range []int{1 << 16, 1 << 20, 4 << 20, benchmarkLength} {
		k := n / 100
		w := newWorkbench(b)
		rng := rand.New(rand.NewPCG(seed, 0))
		residual, grad, y := put(w, normals(rng, n)...), put(w, normals(rng, n)...), room[float32](w, n)
		half := room[uint16](w, n)
		list, other := w.list(ascending(rng, n, k), 2*k), w.list(ascending(rng, n, k), 2*k)
		out, used := w.list(entries{}, 4*k), room[float32](w, 2)
		state, near := put[float32](w, 0, 0), kernel.Acceptance{Min: k / 4, Step: 1.02}
		src := kernel.Source{X: residual, N: n, Grad: grad, DType: dtype.F32, Take: true}
		bf16 := src
		bf16.Grad, bf16.DType = half, dtype.BF16
		require.NoError(b, w.Store(half, dtype.BF16, grad, n, 1, 0))
		both := []kernel.Entries{list, other}
		thresholds, counts := room[float32](w, 15), room[int32](w, 15)
		bracket := room[uint64](w, 1)
		for _, test := range []struct {
			name string
			run  func() error
		}{
			{"copy", func() error { return w.Copy(y, residual, 4*n) }},
			{"accumulate", func() error { return w.Accumulate(src) }},
			{"top k", func() error { return w.TopK(src, k, out, used) }},
			{"top k of chunks", func() error { return w.TopKChunks(src, 41, 4096, out) }},
			{"select near", func() error { return w.SelectNear(src, k, state, near, out, used) }},
			{"select near bf16", func() error { return w.SelectNear(bf16, k, state, near, out, used) }},
			{"fit", func() error { return w.Fit(src, 2.5758, used) }},
			{"top of list", func() error { return w.TopKList(list, k/2, out, 0, kernel.Array{}) }},
			{"merge", func() error { return w.Merge(y, dtype.F32, n, both, 0.5, 0, 0, kernel.Restoration{}) }},
			{"union", func() error { return w.Union(out, n, both, 1, 0, 0) }},
			{"give back", func() error { return w.Restore(kernel.Array{Ptr: y, N: n}, list, other) }},
			{"estimate", func() error {
				for round := range 5 {
					previous := counts
					if round == 0 {
						previous = 0
					}
					if err := w.Narrow(bracket, previous, k/2, thresholds, 15); err != nil {
						return err
					}
					if err := w.CountAbove(list, thresholds, 15, counts); err != nil {
						return err
					}
				}
				return nil
			}},
		} {
			b.Run(fmt.Sprintf("%s/n=%d", test.name, n), func(b *testing.B) {
				measure(b, test.run)
			})
		}
	}
}

// BenchmarkUnionOfTwo merges two lists of 655 entries, whose loop is sensitive to how the compiler uses registers.
func BenchmarkUnionOfTwo(b *testing.B) {
	const n, m = 1 << 16, 655
	rng := rand.New(rand.NewPCG(1, 2))
	list := func() (e entries) {
		for i := range n {
			if rng.IntN(n-i) < m-len(e.idx) {
				e.idx = append(e.idx, int32(i))
				e.val = append(e.val, rng.Float32())
			}
		}
		return e
	}
	first := list()
	second := list()
	dst := entries{
		idx: make([]int32, 2*m),
		val: make([]float32, 2*m),
	}
	for b.Loop() {
		if _, ok := unionOfTwo(first, second, dst, n, 0.5); !ok {
			b.Fatal("the lists do not ascend")
		}
	}
}

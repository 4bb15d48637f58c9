package cpu

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// workbench is a runtime with helpers that put Go slices into its memory.
type workbench struct {
	testing.TB
	*Runtime
}

func newWorkbench(t testing.TB) workbench {
	w := workbench{t, New()}
	t.Cleanup(func() { _ = w.Close() }) // what is live is part of the test
	return w
}

// put copies s into memory of the runtime.
func put[T any](w workbench, s []T) uintptr {
	w.Helper()
	p, err := w.Allocate(len(hostmem.Bytes(s)))
	require.NoError(w, err)
	require.NoError(w, w.CopyIn(p, hostmem.Bytes(s)))
	return p
}

// room allocates n elements.
func room[T any](w workbench, n int) uintptr { return put(w, make([]T, n)) }

// read returns the n elements at p as a view.
func read[T any](p uintptr, n int) []T { return hostmem.Slice[T](p, n) }

func normals(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	return x
}

// ascending returns m distinct indices below n in ascending order.
func ascending(rng *rand.Rand, n, m int) []int32 {
	list := make([]int32, 0, m)
	for _, i := range rng.Perm(n)[:m] {
		list = append(list, int32(i))
	}
	slices.Sort(list)
	return list
}

// kernelLengths are around the block sizes of the vector code and the chunks.
var kernelLengths = []int{0, 1, 7, 31, 32, 33, 1000, chunk - 1, chunk, chunk + 1, 3*chunk + 5}

var gradientTypes = []dtype.DType{dtype.F32, dtype.F16, dtype.BF16}

func TestAccumulate(t *testing.T) {
	const seed = 21
	w := newWorkbench(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, dt := range gradientTypes {
		for _, n := range kernelLengths {
			grad := make([]byte, n*dt.Size())
			require.NoError(t, dtype.FromFloat32(grad, dt, normals(rng, n)))
			terms := make([]float32, n)
			require.NoError(t, dtype.ToFloat32(terms, grad, dt))
			acc := normals(rng, n)
			p := put(w, acc)
			require.NoError(t, w.Accumulate(p, put(w, grad), n, dt))
			for i, got := range read[float32](p, n) {
				require.Equal(t, acc[i]+terms[i], got, "%s, n %d, element %d, seed %d", dt, n, i, seed)
			}
		}
	}
}

func TestStore(t *testing.T) {
	const seed = 22
	w := newWorkbench(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, dt := range gradientTypes {
		for _, n := range kernelLengths {
			x := normals(rng, n)
			for i := range x {
				x[i] *= float32(math.Exp(8 * rng.NormFloat64())) // reaches f16's subnormals and infinity
			}
			const scale = 0.25
			scaled := make([]float32, n)
			for i := range x {
				scaled[i] = x[i] * scale
			}
			want := make([]byte, n*dt.Size())
			require.NoError(t, dtype.FromFloat32(want, dt, scaled))
			src, dst := put(w, x), room[byte](w, n*dt.Size())
			require.NoError(t, w.Store(dst, dt, src, n, scale))
			require.True(t, slices.Equal(want, read[byte](dst, n*dt.Size())), "%s, n %d, seed %d", dt, n, seed)
			require.True(t, slices.Equal(x, read[float32](src, n)), "%s, n %d: the source changed", dt, n)
			if dt == dtype.F32 {
				require.NoError(t, w.Store(src, dt, src, n, scale), "in place")
				require.True(t, slices.Equal(scaled, read[float32](src, n)), "in place, n %d, seed %d", n, seed)
			}
		}
	}
}

func TestScale(t *testing.T) {
	const n = 1000
	w := newWorkbench(t)
	x := normals(rand.New(rand.NewPCG(23, 0)), n)
	p := put(w, x)
	require.NoError(t, w.Scale(p, n, -3))
	for i, got := range read[float32](p, n) {
		require.Equal(t, x[i]*-3, got)
	}
}

func TestTopKMethod(t *testing.T) {
	w := newWorkbench(t)
	nan := float32(math.NaN())
	x := []float32{1, -5, 0, nan, 5, -2}
	p, idx, val := put(w, x), room[int32](w, len(x)), room[float32](w, len(x))

	count, threshold, err := w.TopK(p, len(x), 2, idx, val)
	require.NoError(t, err)
	assert.Equal(t, 2, count)
	assert.Equal(t, float32(5), threshold)
	assert.Equal(t, []int32{1, 3}, read[int32](idx, 2))
	assert.Equal(t, float32(-5), read[float32](val, 2)[0])

	count, threshold, err = w.TopK(p, len(x), 100, idx, val)
	require.NoError(t, err)
	assert.Equal(t, len(x), count)
	assert.Zero(t, threshold)
	assert.Equal(t, []int32{0, 1, 2, 3, 4, 5}, read[int32](idx, len(x)))

	for _, nk := range [][2]int{{len(x), 0}, {0, 0}, {0, 3}} {
		count, threshold, err = w.TopK(p, nk[0], nk[1], 0, 0)
		require.NoError(t, err)
		assert.Zero(t, count)
		assert.Zero(t, threshold)
	}
}

func TestSelectMethod(t *testing.T) {
	const n, seed = 10_000, 24
	w := newWorkbench(t)
	x := normals(rand.New(rand.NewPCG(seed, 0)), n)
	x[17], x[18] = float32(math.NaN()), float32(math.Inf(-1))
	p, idx, val := put(w, x), room[int32](w, n), room[float32](w, n)
	for _, threshold := range []float32{-1, float32(math.Copysign(0, -1)), 0, 0.5, -x[5], x[5], 3, 100, float32(math.Inf(1)), float32(math.NaN())} {
		var want []int32
		for i, v := range x {
			if threshold <= 0 || magnitude(v) >= magnitude(threshold) {
				want = append(want, int32(i))
			}
		}
		count, err := w.CountAbove(p, n, threshold)
		require.NoError(t, err)
		assert.Equal(t, len(want), count, "threshold %v, seed %d", threshold, seed)
		for _, capacity := range []int{0, len(want) / 2, len(want), n, 2 * n} {
			total, err := w.Select(p, n, threshold, idx, val, capacity)
			require.NoError(t, err)
			require.Equal(t, len(want), total, "threshold %v, capacity %d, seed %d", threshold, capacity, seed)
			m := min(capacity, total)
			require.True(t, slices.Equal(want[:m], read[int32](idx, m)), "threshold %v, capacity %d, seed %d", threshold, capacity, seed)
			for j, got := range read[float32](val, m) {
				if i := want[j]; math.Float32bits(x[i]) != math.Float32bits(got) {
					t.Fatalf("seed %d: threshold %v, capacity %d: value %d is %v, want %v", seed, threshold, capacity, j, got, x[i])
				}
			}
		}
	}
}

// exactMeanStd computes with 200 bits.
func exactMeanStd(x []float32) (mean, std float64) {
	newFloat := func(v float64) *big.Float { return new(big.Float).SetPrec(200).SetFloat64(v) }
	sum, squares, n := newFloat(0), newFloat(0), newFloat(float64(len(x)))
	for _, v := range x {
		sum.Add(sum, newFloat(float64(v)))
	}
	average := newFloat(0).Quo(sum, n)
	for _, v := range x {
		d := newFloat(float64(v))
		d.Sub(d, average)
		squares.Add(squares, d.Mul(d, d))
	}
	mean, _ = average.Float64()
	variance, _ := squares.Quo(squares, n).Float64()
	return mean, math.Sqrt(variance)
}

func TestMeanStd(t *testing.T) {
	const seed = 25
	w := newWorkbench(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, n := range []int{1, 2, 100, statsBlock, statsBlock + 1, 5*statsBlock + 3} {
		for _, offset := range []float32{0, 1, 1e6} {
			x := normals(rng, n)
			for i := range x {
				x[i] += offset
			}
			x[0] = 0 // a first element far from the mean
			mean, std, err := w.MeanStd(put(w, x), n)
			require.NoError(t, err)
			wantMean, wantStd := exactMeanStd(x)
			assert.InDelta(t, wantMean, mean, 1e-13*(1+math.Abs(wantMean)), "n %d, offset %v, seed %d", n, offset, seed)
			assert.InDelta(t, wantStd, std, 1e-12*(1+wantStd), "n %d, offset %v, seed %d", n, offset, seed)
		}
	}
	// Far from zero and narrow: E[x²]-E[x]² would lose everything.
	x := make([]float32, 100_000)
	for i := range x {
		x[i] = 1e7 + float32(i%2)
	}
	mean, std, err := w.MeanStd(put(w, x), len(x))
	require.NoError(t, err)
	assert.Equal(t, 1e7+0.5, mean)
	assert.Equal(t, 0.5, std)

	mean, std, err = w.MeanStd(0, 0)
	require.NoError(t, err)
	assert.Zero(t, mean)
	assert.Zero(t, std)

	x[99_000] = float32(math.Inf(1))
	mean, std, err = w.MeanStd(put(w, x), len(x))
	require.NoError(t, err)
	assert.Equal(t, math.Inf(1), mean)
	assert.True(t, math.IsNaN(std))

	x[5] = float32(math.NaN())
	mean, std, err = w.MeanStd(put(w, x), len(x))
	require.NoError(t, err)
	assert.True(t, math.IsNaN(mean))
	assert.True(t, math.IsNaN(std))
}

func TestSumSquares(t *testing.T) {
	const seed = 26
	w := newWorkbench(t)
	for _, n := range kernelLengths {
		x := normals(rand.New(rand.NewPCG(seed, 0)), n)
		exact := new(big.Float).SetPrec(200)
		for _, v := range x {
			exact.Add(exact, new(big.Float).SetFloat64(float64(v)*float64(v)))
		}
		want, _ := exact.Float64()
		got, err := w.SumSquares(put(w, x), n)
		require.NoError(t, err)
		assert.InDelta(t, want, got, 1e-13*want, "n %d, seed %d", n, seed)
	}
	got, err := w.SumSquares(put(w, []float32{3e38, 3e38}), 2)
	require.NoError(t, err)
	assert.InEpsilon(t, 2*9e76, got, 1e-6, "squares beyond float32's range")
}

func TestScatterGather(t *testing.T) {
	const n, m, seed = 5000, 700, 27
	w := newWorkbench(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	dense, list, values := normals(rng, n), ascending(rng, n, m), normals(rng, m)
	idx, val := put(w, list), put(w, values)

	for _, test := range []struct {
		name string
		run  func(dst uintptr) error
		want func(old, v float32) float32
	}{
		{"ScatterAdd", func(dst uintptr) error { return w.ScatterAdd(dst, n, idx, val, m) }, func(old, v float32) float32 { return old + v }},
		{"ScatterSet", func(dst uintptr) error { return w.ScatterSet(dst, n, idx, val, m) }, func(_, v float32) float32 { return v }},
		{"ZeroAt", func(dst uintptr) error { return w.ZeroAt(dst, n, idx, m) }, func(float32, float32) float32 { return 0 }},
	} {
		dst := put(w, dense)
		require.NoError(t, test.run(dst))
		want := slices.Clone(dense)
		for j, i := range list {
			want[i] = test.want(want[i], values[j])
		}
		assert.True(t, slices.Equal(want, read[float32](dst, n)), "%s, seed %d", test.name, seed)
	}

	// Gather takes indices in any order, also repeated ones.
	anyOrder := make([]int32, 2*n)
	for j := range anyOrder {
		anyOrder[j] = rng.Int32N(n)
	}
	out := room[float32](w, len(anyOrder))
	require.NoError(t, w.Gather(put(w, dense), n, put(w, anyOrder), len(anyOrder), out))
	for j, got := range read[float32](out, len(anyOrder)) {
		require.Equal(t, dense[anyOrder[j]], got, "entry %d, seed %d", j, seed)
	}
}

// TestSparsePastFloatIntegers goes through indices that float32 cannot hold.
func TestSparsePastFloatIntegers(t *testing.T) {
	const n = 1<<25 + 9
	w := newWorkbench(t)
	list := []int32{0, 1<<24 + 1, 1<<24 + 2, 1<<25 - 1, n - 1}
	values := []float32{1, 2, 3, 4, 5}
	m := len(list)
	dst, err := w.Allocate(4 * n)
	require.NoError(t, err)
	require.NoError(t, w.Fill(dst, n, dtype.F32, 0))
	require.NoError(t, w.ScatterSet(dst, n, put(w, list), put(w, values), m))

	idx, val := room[int32](w, m), room[float32](w, m)
	total, err := w.Select(dst, n, 1, idx, val, m)
	require.NoError(t, err)
	assert.Equal(t, m, total)
	assert.Equal(t, list, read[int32](idx, m))
	assert.Equal(t, values, read[float32](val, m))

	require.NoError(t, w.ScatterAdd(dst, n, idx, val, m))
	require.NoError(t, w.Gather(dst, n, idx, m, val))
	assert.Equal(t, []float32{2, 4, 6, 8, 10}, read[float32](val, m))
	require.NoError(t, w.ZeroAt(dst, n, idx, m))
	sum, err := w.SumSquares(dst, n)
	require.NoError(t, err)
	assert.Zero(t, sum)
}

func TestOffsetIndices(t *testing.T) {
	w := newWorkbench(t)
	p := put(w, []int32{3, 4, math.MaxInt32 - 5})
	require.NoError(t, w.OffsetIndices(p, 3, 5))
	assert.Equal(t, []int32{8, 9, math.MaxInt32}, read[int32](p, 3))
	require.ErrorIs(t, w.OffsetIndices(p, 3, 1), runtime.ErrArgument)
	require.ErrorIs(t, w.OffsetIndices(p, 3, -9), runtime.ErrArgument)
	assert.Equal(t, []int32{8, 9, math.MaxInt32}, read[int32](p, 3), "unchanged after an error")
	require.NoError(t, w.OffsetIndices(p, 3, -8))
	assert.Equal(t, []int32{0, 1, math.MaxInt32 - 8}, read[int32](p, 3))
	require.NoError(t, w.OffsetIndices(0, 0, math.MinInt32))
}

func TestMergeAdd(t *testing.T) {
	const seed = 28
	w := newWorkbench(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, size := range [][3]int{{0, 0, 10}, {0, 5, 10}, {5, 0, 10}, {1, 1, 1}, {10, 10, 10}, {50, 60, 100}, {1000, 3, 5000}, {300, 400, 100_000}} {
		ma, mb, n := size[0], size[1], size[2]
		idxA, idxB := ascending(rng, n, ma), ascending(rng, n, mb)
		valA, valB := normals(rng, ma), normals(rng, mb)
		if ma > 0 {
			valA[0] = float32(math.Copysign(0, -1)) // must not become +0 on its way
		}
		merged := map[int32]float32{}
		for j, i := range idxA {
			merged[i] = valA[j]
		}
		for j, i := range idxB {
			if v, both := merged[i]; both {
				merged[i] = v + valB[j]
			} else {
				merged[i] = valB[j]
			}
		}
		idxOut, valOut := room[int32](w, ma+mb), room[float32](w, ma+mb)
		m, err := w.MergeAdd(put(w, idxA), put(w, valA), ma, put(w, idxB), put(w, valB), mb, idxOut, valOut)
		require.NoError(t, err)
		what := fmt.Sprintf("%d and %d of %d, seed %d", ma, mb, n, seed)
		require.Equal(t, len(merged), m, what)
		list := read[int32](idxOut, m)
		require.True(t, slices.IsSorted(list), what)
		for j, i := range list {
			require.Contains(t, merged, i, what)
			require.Equal(t, math.Float32bits(merged[i]), math.Float32bits(read[float32](valOut, m)[j]), "%s, index %d", what, i)
		}
	}
}

func TestLowerBounds(t *testing.T) {
	const n, m, seed = 1000, 200, 29
	w := newWorkbench(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	list := ascending(rng, n, m)
	bounds := []int32{math.MinInt32, -1, 0, list[0], list[0] + 1, list[m/2], list[m-1], list[m-1] + 1, math.MaxInt32, 5}
	for range 50 {
		bounds = append(bounds, rng.Int32N(n))
	}
	positions := make([]int, len(bounds))
	require.NoError(t, w.LowerBounds(put(w, list), m, bounds, positions))
	for j, bound := range bounds {
		want := sort.Search(m, func(i int) bool { return list[i] >= bound })
		assert.Equal(t, want, positions[j], "bound %d, seed %d", bound, seed)
	}
	require.NoError(t, w.LowerBounds(0, 0, bounds[:1], positions[:1]))
	assert.Zero(t, positions[0])
	require.ErrorIs(t, w.LowerBounds(put(w, list), m, bounds, positions[1:]), runtime.ErrArgument)
}

// kernelCalls calls every method with arrays of n elements that all start at p.
func kernelCalls(w workbench, p uintptr, n int) map[string]func() error {
	return map[string]func() error{
		"Accumulate":    func() error { return w.Accumulate(p, p, n, dtype.F32) },
		"Store":         func() error { return w.Store(p, dtype.F32, p, n, 1) },
		"Scale":         func() error { return w.Scale(p, n, 1) },
		"TopK":          func() error { _, _, err := w.TopK(p, n, 1, p, p); return err },
		"Select":        func() error { _, err := w.Select(p, n, 1, p, p, 1); return err },
		"CountAbove":    func() error { _, err := w.CountAbove(p, n, 1); return err },
		"MeanStd":       func() error { _, _, err := w.MeanStd(p, n); return err },
		"SumSquares":    func() error { _, err := w.SumSquares(p, n); return err },
		"ScatterAdd":    func() error { return w.ScatterAdd(p, n, p, p, n) },
		"ScatterSet":    func() error { return w.ScatterSet(p, n, p, p, n) },
		"Gather":        func() error { return w.Gather(p, n, p, n, p) },
		"ZeroAt":        func() error { return w.ZeroAt(p, n, p, n) },
		"OffsetIndices": func() error { return w.OffsetIndices(p, n, 0) },
		"MergeAdd":      func() error { _, err := w.MergeAdd(p, p, n, p, p, n, p, p); return err },
		"LowerBounds":   func() error { return w.LowerBounds(p, n, []int32{1}, []int{0}) },
	}
}

func TestKernelArguments(t *testing.T) {
	w := newWorkbench(t)
	p := room[float32](w, 8)
	for what, calls := range map[string]map[string]func() error{
		"negative length": kernelCalls(w, p, -1),
		"length 2^31":     kernelCalls(w, p, math.MaxInt32+1),
		"nil pointer":     kernelCalls(w, 0, 1),
	} {
		for name, call := range calls {
			assert.ErrorIs(t, call(), runtime.ErrArgument, "%s: %s", name, what)
		}
	}
	for name, call := range kernelCalls(w, 0, 0) {
		assert.NoError(t, call(), "%s: nothing to do", name)
	}

	_, _, err := w.TopK(p, 8, -1, p, p)
	assert.ErrorIs(t, err, runtime.ErrArgument)
	_, err = w.Select(p, 8, 1, p, p, -1)
	assert.ErrorIs(t, err, runtime.ErrArgument)
	assert.ErrorIs(t, w.ZeroAt(0, 8, p, 8), runtime.ErrArgument, "nil destination")
	_, err = w.MergeAdd(p, p, math.MaxInt32, p, p, 1, p, p)
	assert.ErrorIs(t, err, runtime.ErrArgument, "a result of 2^31 elements")
	for _, dt := range []dtype.DType{dtype.Invalid, dtype.F64, dtype.I32, dtype.I16, dtype.FP8E4M3} {
		assert.ErrorIs(t, w.Accumulate(p, p, 1, dt), runtime.ErrDType, dt)
		assert.ErrorIs(t, w.Store(p, dt, p, 1, 1), runtime.ErrDType, dt)
	}
}

// TestListsThatDoNotAscend checks that also the inside of a list is checked,
// before anything is written.
func TestListsThatDoNotAscend(t *testing.T) {
	w := newWorkbench(t)
	dst, val := put(w, []float32{1, 2, 3}), put(w, []float32{9, 9, 9})
	for _, wrong := range []int32{3, -1, math.MaxInt32, math.MinInt32} {
		idx := put(w, []int32{0, wrong, 1})
		for name, err := range map[string]error{
			"ScatterAdd": w.ScatterAdd(dst, 3, idx, val, 3),
			"ScatterSet": w.ScatterSet(dst, 3, idx, val, 3),
			"Gather":     w.Gather(dst, 3, idx, 3, val),
			"ZeroAt":     w.ZeroAt(dst, 3, idx, 3),
		} {
			assert.ErrorIs(t, err, runtime.ErrArgument, "%s of %d", name, wrong)
			assert.ErrorContains(t, err, fmt.Sprintf("idx[1] is %d", wrong), name)
		}
	}
	assert.Equal(t, []float32{1, 2, 3}, read[float32](dst, 3))
	assert.Equal(t, []float32{9, 9, 9}, read[float32](val, 3))
}

func TestKernelsAfterClose(t *testing.T) {
	w := newWorkbench(t)
	require.NoError(t, w.Close())
	for name, call := range kernelCalls(w, 64, 1) {
		assert.ErrorIs(t, call(), runtime.ErrClosed, name)
	}
}

func TestKernelsAllocateNothing(t *testing.T) {
	const n, k, seed = 100_000, 1000, 30
	w := newWorkbench(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	x, y := put(w, normals(rng, n)), put(w, normals(rng, n))
	half, idxHalf := room[uint16](w, n), room[int32](w, n)
	idx, val := put(w, ascending(rng, n, k)), put(w, normals(rng, k))
	idxB, valB := put(w, ascending(rng, n, k)), put(w, normals(rng, k))
	idxOut, valOut := room[int32](w, 2*k), room[float32](w, 2*k)
	bounds, positions := []int32{10, 1000, 50_000}, make([]int, 3)
	for name, call := range map[string]func() error{
		"Accumulate f32":  func() error { return w.Accumulate(x, y, n, dtype.F32) },
		"Accumulate f16":  func() error { return w.Accumulate(x, half, n, dtype.F16) },
		"Accumulate bf16": func() error { return w.Accumulate(x, half, n, dtype.BF16) },
		"Store f32":       func() error { return w.Store(y, dtype.F32, x, n, 0.5) },
		"Store f16":       func() error { return w.Store(half, dtype.F16, x, n, 0.5) },
		"Store bf16":      func() error { return w.Store(half, dtype.BF16, x, n, 0.5) },
		"Scale":           func() error { return w.Scale(y, n, 1) },
		"TopK":            func() error { _, _, err := w.TopK(x, n, k, idxOut, valOut); return err },
		"TopK of half":    func() error { _, _, err := w.TopK(x, n, n/2, idxHalf, y); return err },
		"Select":          func() error { _, err := w.Select(x, n, 2, idxOut, valOut, 2*k); return err },
		"CountAbove":      func() error { _, err := w.CountAbove(x, n, 2); return err },
		"MeanStd":         func() error { _, _, err := w.MeanStd(x, n); return err },
		"SumSquares":      func() error { _, err := w.SumSquares(x, n); return err },
		"ScatterAdd":      func() error { return w.ScatterAdd(x, n, idx, val, k) },
		"ScatterSet":      func() error { return w.ScatterSet(x, n, idx, val, k) },
		"Gather":          func() error { return w.Gather(x, n, idx, k, val) },
		"ZeroAt":          func() error { return w.ZeroAt(x, n, idx, k) },
		"OffsetIndices":   func() error { return w.OffsetIndices(idx, k, 0) },
		"MergeAdd":        func() error { _, err := w.MergeAdd(idx, val, k, idxB, valB, k, idxOut, valOut); return err },
		"LowerBounds":     func() error { return w.LowerBounds(idx, k, bounds, positions) },
	} {
		require.NoError(t, call(), name) // also fills the list of scratch memory
		assert.Zero(t, testing.AllocsPerRun(5, func() { _ = call() }), name)
	}
}

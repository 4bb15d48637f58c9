package cpu

import (
	"encoding/binary"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// runtimetest tests the contract; here is what this implementation promises beyond it.

// read returns the n elements at p as a view.
func read[T any](p uintptr, n int) []T { return hostmem.Slice[T](p, n) }

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
	rng := rand.New(rand.NewPCG(seed, 0))
	var s scratch
	for _, n := range []int{1, 2, 100, chunk, chunk + 1, 5*chunk + 3} {
		for _, offset := range []float32{0, 1, 1e6} {
			x := normals(rng, n)
			for i := range x {
				x[i] += offset
			}
			x[0] = 0 // a first element far from the mean
			mean, std := s.meanStd(&source{x: x})
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
	mean, std := s.meanStd(&source{x: x})
	assert.Equal(t, 1e7+0.5, mean)
	assert.Equal(t, 0.5, std)

	x[99_000] = float32(math.Inf(1))
	mean, std = s.meanStd(&source{x: x})
	assert.Equal(t, math.Inf(1), mean)
	assert.True(t, math.IsNaN(std))
}

func TestSumSquaresBeyondFloat32(t *testing.T) {
	w := newWorkbench(t)
	sum := room[float64](w, 1)
	require.NoError(t, w.SumSquares(put(w, float32(3e38), float32(3e38)), dtype.F32, 2, sum))
	assert.InEpsilon(t, 2*9e76, read[float64](sum, 1)[0], 1e-6)
}

// TestSparsePastFloatIntegers goes through indices that float32 cannot hold.
func TestSparsePastFloatIntegers(t *testing.T) {
	const n = 1<<24 + 9
	w := newWorkbench(t)
	list := entries{[]int32{0, 1<<24 + 1, 1<<24 + 2, 1<<24 + 5, n - 1}, []float32{1, 2, 3, 4, 5}}
	m := len(list.idx)
	l, out := w.list(list, m), w.list(entries{}, 2*m)
	dst, err := w.Allocate(4 * n)
	require.NoError(t, err)
	array := kernel.Array{Ptr: dst, N: n, Faults: put(w, int32(0))}
	require.NoError(t, w.Merge(dst, dtype.F32, n, []kernel.Entries{l}, 1, array.Faults, 0, kernel.Restoration{}))
	require.NoError(t, w.ScatterAdd(array, l, 1))
	require.NoError(t, w.Select(kernel.Source{X: dst, N: n, Take: true}, put(w, float32(1)), out))
	assert.EqualValues(t, m, read[int32](out.Len, 1)[0])
	assert.Equal(t, list.idx, read[int32](out.Idx, m))
	assert.Equal(t, []float32{2, 4, 6, 8, 10}, read[float32](out.Val, m))
	require.NoError(t, w.Union(out, n, []kernel.Entries{l, l}, 0.5, array.Faults, 0))
	assert.Equal(t, list.idx, read[int32](out.Idx, m))
	assert.Equal(t, list.val, read[float32](out.Val, m))
	sum := room[float64](w, 1)
	require.NoError(t, w.SumSquares(dst, dtype.F32, n, sum))
	assert.Zero(t, read[float64](sum, 1)[0])
	assert.Zero(t, read[int32](array.Faults, 1)[0])
}

// kernelCalls are calls of every method, on arrays of n elements; lists have k.
func kernelCalls(w workbench, n, k int) map[string]func() error {
	const seed = 30
	rng := rand.New(rand.NewPCG(seed, 0))
	x, y := put(w, normals(rng, n)...), put(w, normals(rng, n)...)
	half := room[uint16](w, n)
	list, other, out := w.list(ascending(rng, n, k), 2*k), w.list(ascending(rng, n, k), 2*k), w.list(entries{}, n)
	words, one, zero := room[int32](w, 64), put(w, float32(1)), put[float32](w, 0, 0)
	state, two := put[float32](w, 2, 0), put[float32](w, 2, 0)
	bounds, thresholds := put[int32](w, 0, 10, 1000, 50_000), put[float32](w, 1, 2, 3)
	src := kernel.Source{X: x, N: n, Grad: y, DType: dtype.F32, Take: true}
	bf16 := kernel.Source{X: x, N: n, Grad: half, DType: dtype.BF16, Factor: one}
	array, both := kernel.Array{Ptr: x, N: n, Faults: words}, []kernel.Entries{list, other}
	factors, quantiles := []float32{0.25, 0.5, 1, 2}, []float64{0, 0.5}
	pieces := []kernel.Piece{{From: list, End: words, To: out}, {From: other, Start: words, To: out}}
	message := kernel.Message{Ptr: room[float32](w, 2*n), Bytes: 8 * n}
	return map[string]func() error{
		"Accumulate":      func() error { return w.Accumulate(src) },
		"Accumulate bf16": func() error { return w.Accumulate(bf16) },
		"Store":           func() error { return w.Store(y, dtype.F32, x, n, 0.5, 0) },
		"Store f16":       func() error { return w.Store(half, dtype.F16, x, n, 0.5, 0) },
		"Scale":           func() error { return w.Scale(y, dtype.F32, n, one) },
		"Scale f16":       func() error { return w.Scale(half, dtype.F16, n, one) },
		"SumSquares":      func() error { return w.SumSquares(half, dtype.F16, n, words) },
		"ClipFactor":      func() error { return w.ClipFactor(zero, words, 1, 1, 1) },
		"TopK":            func() error { return w.TopK(src, k, out, 0) },
		"TopK guessed":    func() error { return w.TopK(src, k, out, two) },
		"TopK of half":    func() error { return w.TopK(bf16, n/2, out, 0) },
		"Select":          func() error { return w.Select(bf16, two, out) },
		"SelectNear": func() error {
			return w.SelectNear(src, k, state, kernel.Acceptance{Interval: 3, Step: 1.02}, out, zero)
		},
		"Fit":         func() error { return w.Fit(src, 2, zero) },
		"Refine":      func() error { return w.Refine(x, n, one, k, factors) },
		"TopKList":    func() error { return w.TopKList(list, k/2, out, 0, kernel.Array{}) },
		"SelectList":  func() error { return w.SelectList(list, one, out) },
		"CountAbove":  func() error { return w.CountAbove(list, thresholds, 3, words) },
		"Narrow":      func() error { return w.Narrow(state, 0, k, thresholds, 3) },
		"Merge":       func() error { return w.Merge(y, dtype.F32, n, both, 0.5, words, 0, kernel.Restoration{}) },
		"Merge bf16":  func() error { return w.Merge(half, dtype.BF16, n, both, 0.5, words, 0, kernel.Restoration{}) },
		"Union":       func() error { return w.Union(out, n, both, 0.5, words, 0) },
		"ScatterAdd":  func() error { return w.ScatterAdd(array, list, 1) },
		"ScatterZero": func() error { return w.ScatterZero(array, list) },
		"Restore":     func() error { return w.Restore(array, list, other) },
		"LowerBounds": func() error { return w.LowerBounds(list, bounds, 4, words, thresholds) },
		"CopyPieces":  func() error { return w.CopyPieces(pieces) },
		"Sample":      func() error { return w.Sample(list, quantiles, n, words) },
		"Balance":     func() error { return w.Balance(bounds, 4, n, words, 3) },
		"TopKChunks":  func() error { return w.TopKChunks(bf16, 10, 4096, out) },
		"Encode":      func() error { return w.Encode(list, kernel.CodecI8, n, message, array) },
		"Encode i2":   func() error { return w.Encode(list, kernel.CodecI2, n, message, array) },
		"Decode":      func() error { return w.Decode(message, kernel.CodecI8, out) },
		"Quantize":    func() error { return w.Quantize(y, kernel.CodecFP8, x, n, x) },
		"Dequantize":  func() error { return w.Dequantize(x, kernel.CodecI4, y, n, true) },
	}
}

// TestPastTheCaches expects arrays long enough to be written past the caches to hold what their parts, which are not,
// hold.
func TestPastTheCaches(t *testing.T) {
	const seed, from = 12, 1 << 17
	const n, part = 2*from + 5, from - 1
	defer func(before int) { streamFrom = before }(streamFrom)
	streamFrom = from
	rng := rand.New(rand.NewPCG(seed, 0))
	w := newWorkbench(t)
	old, grad, threshold := put(w, normals(rng, n)...), put(w, normals(rng, n)...), put(w, float32(3.6))
	sums, want := room[float32](w, n), room[float32](w, n)
	step := func(residual uintptr, at, n int) kernel.Entries {
		offset, all := uintptr(4*at), w.list(entries{}, n)
		require.NoError(t, w.Select(kernel.Source{X: residual + offset, N: n, Grad: grad + offset, DType: dtype.F32, From: old + offset, Take: true}, threshold, all))
		return all
	}
	all := step(sums, 0, n)
	picked := int(read[int32](all.Len, 1)[0])
	var lists [2]kernel.Entries
	lists[0] = all
	done := 0
	for at := 0; at < n; at += part {
		of := step(want, at, min(part, n-at))
		for j, i := range read[int32](of.Idx, int(read[int32](of.Len, 1)[0])) {
			require.Equal(t, int32(at)+i, read[int32](all.Idx, picked)[done], "seed %d", seed)
			require.Equal(t, read[float32](of.Val, j+1)[j], read[float32](all.Val, picked)[done], "seed %d", seed)
			done++
		}
	}
	require.Equal(t, done, picked)
	require.True(t, slices.Equal(read[float32](want, n), read[float32](sums, n)), "seed %d", seed)

	lists[1] = w.list(ascending(rng, n, n/50), 0)
	require.NoError(t, w.Merge(sums, dtype.F32, n, lists[:], 0.5, 0, 0, kernel.Restoration{}))
	require.NoError(t, w.Fill(want, n, dtype.F32, 0))
	for _, l := range lists {
		require.NoError(t, w.ScatterAdd(kernel.Array{Ptr: want, N: n}, l, 0.5))
	}
	require.True(t, slices.Equal(read[float32](want, n), read[float32](sums, n)), "seed %d", seed)
}

func TestKernelsAllocateNothing(t *testing.T) {
	for name, call := range kernelCalls(newWorkbench(t), 100_000, 1000) {
		require.NoError(t, call(), name) // also fills the list of scratch memory
		require.NoError(t, call(), name)
		// Allocations of the rest of the process count as well, and a list of candidates that is longer than before:
		// the least of many rounds counts, usually of one.
		least := math.Inf(1)
		for round := 0; round < 100 && least > 0; round++ {
			least = min(least, testing.AllocsPerRun(5, func() { _ = call() }))
		}
		require.NoError(t, call(), name)
		assert.Zero(t, least, name)
	}
}

func TestKernelsAfterClose(t *testing.T) {
	w := newWorkbench(t)
	calls := kernelCalls(w, 100, 10)
	require.ErrorIs(t, w.Close(), runtime.ErrLeak)
	for name, call := range calls {
		assert.ErrorIs(t, call(), runtime.ErrClosed, name)
	}
}

// FuzzLists gives lists of any content and any length to the kernels that
// follow indices. They must keep within their arrays, count exactly what is out
// of range, and, if the lists ascend, add up as a map does.
func FuzzLists(f *testing.F) {
	f.Add([]byte{}, []byte{}, uint16(0), int32(0))
	f.Add([]byte{1, 0, 0, 0, 2, 0, 0, 0}, []byte{2, 0, 0, 0}, uint16(3), int32(2))
	f.Add([]byte{255, 255, 255, 255, 0, 0, 0, 0}, []byte{2, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 127}, uint16(9000), int32(-1))
	f.Add(slices.Repeat([]byte{7, 0, 0, 0}, 50), slices.Repeat([]byte{3, 32, 0, 0}, 9), uint16(9000), int32(math.MaxInt32))
	f.Fuzz(func(t *testing.T, first, second []byte, size uint16, length int32) {
		const guard = 64
		w, n := newWorkbench(t), int(size)
		var lists []kernel.Entries
		sums, outside, ascends := map[int32]float32{}, [2]int32{}, true
		for r, data := range [][]byte{first, second} {
			e := entries{}
			for ; len(data) >= 4; data = data[4:] {
				e.idx, e.val = append(e.idx, int32(binary.LittleEndian.Uint32(data))), append(e.val, float32(len(data)))
			}
			l := w.list(e, 0)
			if r == 1 {
				read[int32](l.Len, 1)[0] = length
				e = e.cut(max(int(length), 0))
			}
			for j, i := range e.idx {
				if i < 0 || int(i) >= n {
					outside[r]++
				} else {
					sums[i] += e.val[j]
				}
				ascends = ascends && (j == 0 || e.idx[j-1] < i)
			}
			lists = append(lists, l)
		}
		x := room[float32](w, guard+n+guard)
		dense := x + 4*guard
		faults := room[int32](w, 1)
		array, other := kernel.Array{Ptr: dense, N: n, Faults: faults}, kernel.Array{Ptr: room[float32](w, n), N: n, Faults: faults}
		counted := func(want int32, err error) {
			t.Helper()
			require.NoError(t, err)
			require.Equal(t, want, read[int32](faults, 1)[0])
			read[int32](faults, 1)[0] = 0
			for i := range guard {
				require.Zero(t, read[float32](x, 2*guard+n)[i], "before the array")
				require.Zero(t, read[float32](x, 2*guard+n)[guard+n+i], "behind the array")
			}
		}
		counted(outside[0]+outside[1], w.Merge(dense, dtype.F32, n, lists, 1, faults, 0, kernel.Restoration{}))
		if ascends {
			for i, v := range read[float32](dense, n) {
				require.Equal(t, sums[int32(i)], v, "element %d", i)
			}
		}
		room := min(n, lists[0].N+lists[1].N)
		union := w.list(entries{}, room+guard)
		union.N = room
		counted(outside[0]+outside[1], w.Union(union, n, lists, 1, faults, 0))
		total := int(read[int32](union.Len, 1)[0])
		require.LessOrEqual(t, total, room)
		if ascends {
			require.Len(t, sums, total)
		}
		for j, i := range read[int32](union.Idx, room+guard) {
			if j < total {
				require.True(t, 0 <= i && int(i) < n && (j == 0 || read[int32](union.Idx, room)[j-1] < i), "index %d is %d", j, i)
				if ascends {
					require.Equal(t, sums[i], read[float32](union.Val, room)[j])
				}
			} else if j >= room {
				require.Zero(t, i, "behind the union")
			}
		}
		few, ten := w.list(entries{}, 3+guard), put(w, float32(10))
		few.N = 3
		counted(outside[0]+outside[1], w.Union(few, n, lists, 1, faults, ten))
		passed := 0
		for _, v := range sums {
			if v >= 10 { // none is negative
				passed++
			}
		}
		if ascends {
			require.EqualValues(t, passed, read[int32](few.Len, 1)[0])
		}
		for j, i := range read[int32](few.Idx, 3+guard) {
			if v := read[float32](few.Val, 3+guard)[j]; j < min(passed, 3) && ascends {
				require.Equal(t, sums[i], v)
				require.GreaterOrEqual(t, v, float32(10))
			} else if j >= 3 {
				require.Zero(t, i, "behind the union")
				require.Zero(t, v, "behind the union")
			}
		}
		counted(outside[0]+outside[1]+outside[0], w.Merge(dense, dtype.F32, n, lists, 1, faults, 0, kernel.Restoration{Dst: other, L: lists[0], Taken: lists[1]}))
		counted(outside[0], w.ScatterAdd(array, lists[0], 1))
		counted(outside[1], w.ScatterAdd(array, lists[1], 1))
		counted(outside[0], w.ScatterZero(array, lists[0]))
		counted(outside[0], w.Restore(array, lists[0], lists[1]))
		counted(outside[1], w.Restore(array, lists[1], lists[0]))
		top := w.list(entries{}, 5)
		counted(0, w.TopKList(lists[1], 5, top, 0, kernel.Array{}))
		counted(0, w.SelectList(lists[1], put(w, float32(3)), top))
		bounds := put[int32](w, 0, int32(n/2), int32(n))
		within := put(w, length, int32(n/2))
		left, none := int32(0), w.list(entries{}, 5)
		if l := read[int32](lists[0].Idx, lists[0].N); slices.IsSorted(l) { // all that is left out is restored
			for _, i := range l {
				if (i < length || i >= int32(n/2)) && (i < 0 || int(i) >= n) {
					left++
				}
			}
			counted(left, w.TopKList(lists[0], 0, none, within, array))
		} else {
			require.NoError(t, w.TopKList(lists[0], 2, none, within, array))
			read[int32](faults, 1)[0] = 0
			counted(0, nil)
		}
		counted(0, w.CopyPieces([]kernel.Piece{{From: lists[0], Start: within, End: bounds + 8, ByIndex: true, To: top}, {From: lists[1], End: within, ByIndex: true, To: top}}))
		counted(0, w.LowerBounds(lists[1], bounds, 3, top.Idx, 0))
		counted(0, w.CopyPieces([]kernel.Piece{{From: lists[1], Start: bounds, End: lists[0].Idx, To: top}}))
		counted(0, w.Sample(lists[1], []float64{0, 0.99}, n, top.Idx))
	})
}

package runtimetest

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

var kernelTests = []test{
	{"accumulate", testAccumulate},
	{"store", testStore},
	{"scale", testScale},
	{"top k", testTopK},
	{"select and count", testSelect},
	{"mean, deviation, sum of squares", testMoments},
	{"scatter, gather, zero", testScatter},
	{"indices out of range", testOutside},
	{"offset indices", testOffsetIndices},
	{"merge add", testMergeAdd},
	{"lower bounds", testLowerBounds},
	{"bad arguments", testKernelArguments},
}

// kernels returns the kernels of the runtime, or skips the test.
func (d *device) kernels() runtime.Kernels {
	k, ok := d.Runtime.(runtime.Kernels)
	if !ok {
		d.Skip("the runtime has no runtime.Kernels")
	}
	return k
}

// floats uploads values.
func (d *device) floats(values []float32) uintptr {
	d.Helper()
	bytes, err := binary.Append(nil, binary.NativeEndian, values)
	require.NoError(d, err)
	return d.upload(bytes)
}

func (d *device) indices(values []int32) uintptr {
	d.Helper()
	bytes, err := binary.Append(nil, binary.NativeEndian, values)
	require.NoError(d, err)
	return d.upload(bytes)
}

func (d *device) readFloats(ptr uintptr, n int) []float32 {
	d.Helper()
	values := make([]float32, n)
	_, err := binary.Decode(d.download(ptr, 4*n), binary.NativeEndian, values)
	require.NoError(d, err)
	return values
}

func (d *device) readIndices(ptr uintptr, n int) []int32 {
	d.Helper()
	values := make([]int32, n)
	_, err := binary.Decode(d.download(ptr, 4*n), binary.NativeEndian, values)
	require.NoError(d, err)
	return values
}

// equalFloats compares by bits, except that all NaNs are equal.
func (d *device) equalFloats(want, got []float32, what string, args ...any) {
	d.Helper()
	require.Len(d, got, len(want))
	for i := range want {
		if !sameFloat32(want[i], got[i]) {
			d.Logf(what, args...)
			d.Fatalf("element %d of %d: got %v, want %v (seed %d)", i, len(want), got[i], want[i], Seed)
		}
	}
}

func sameFloat32(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

// specialValues are numbers that arithmetic treats in ways of their own.
var specialValues = []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)), 0,
	float32(math.Copysign(0, -1)), math.SmallestNonzeroFloat32, -math.MaxFloat32, 0x1p-126}

// gradients are the inputs that kernels are tried on: element i of n.
var gradients = []struct {
	name string
	at   func(rng *rand.Rand, i, n int) float32
}{
	{"normal", func(rng *rand.Rand, _, _ int) float32 { return float32(rng.NormFloat64()) }},
	{"ties", func(rng *rand.Rand, _, _ int) float32 { return float32(rng.IntN(7) - 3) }},
	{"equal", func(*rand.Rand, int, int) float32 { return -1.5 }},
	{"zero", func(*rand.Rand, int, int) float32 { return 0 }},
	{"ascending", func(_ *rand.Rand, i, _ int) float32 { return float32(i) }},
	{"descending", func(_ *rand.Rand, i, n int) float32 { return float32(n - i) }},
	{"wide", func(rng *rand.Rand, _, _ int) float32 { return float32(math.Exp2(float64(rng.IntN(250) - 125))) }},
	{"sparse", func(rng *rand.Rand, _, _ int) float32 {
		if rng.IntN(100) == 0 {
			return float32(rng.NormFloat64())
		}
		return 0
	}},
	{"clustered", func(rng *rand.Rand, i, n int) float32 {
		return float32(rng.NormFloat64() * math.Exp(-float64(i)/(1+float64(n)/20)))
	}},
	{"special", func(rng *rand.Rand, _, _ int) float32 {
		if rng.IntN(3) == 0 {
			return specialValues[rng.IntN(len(specialValues))]
		}
		return float32(rng.NormFloat64())
	}},
}

// gradient draws n elements of one of the gradients.
func (d *device) gradient(name string, n int) []float32 {
	for _, g := range gradients {
		if g.name == name {
			x := make([]float32, n)
			for i := range x {
				x[i] = g.at(d.rng, i, n)
			}
			return x
		}
	}
	d.Fatalf("no gradient is named %q", name)
	return nil
}

// eachGradient runs f on every gradient of every size.
func (d *device) eachGradient(f func(d *device, x []float32)) {
	for _, n := range kernelSizes {
		for _, g := range gradients {
			d.each(func(d *device) { f(d, d.gradient(g.name, n)) }, "%d %s", n, g.name)
		}
	}
}

// gradientTypes are the dtypes that Accumulate reads and Store writes.
var gradientTypes = []dtype.DType{dtype.F32, dtype.F16, dtype.BF16}

func testAccumulate(d *device) {
	k := d.kernels()
	d.eachGradient(func(d *device, x []float32) {
		for _, dt := range gradientTypes {
			grad, narrow := d.narrow(x, dt)
			acc := d.gradient("normal", len(x))
			ptr := d.floats(acc)
			require.NoError(d, k.Accumulate(ptr, d.upload(grad), len(x), dt))
			for i := range acc {
				acc[i] += narrow[i]
			}
			d.equalFloats(acc, d.readFloats(ptr, len(x)), "%v", dt)
		}
	})
}

// narrow returns x in dt, and the values it has there.
func (d *device) narrow(x []float32, dt dtype.DType) ([]byte, []float32) {
	d.Helper()
	bytes, values := make([]byte, len(x)*dt.Size()), make([]float32, len(x))
	require.NoError(d, dtype.FromFloat32(bytes, dt, x))
	require.NoError(d, dtype.ToFloat32(values, bytes, dt))
	return bytes, values
}

func testStore(d *device) {
	k := d.kernels()
	d.eachGradient(func(d *device, x []float32) {
		for _, dt := range gradientTypes {
			for _, scale := range []float32{1, .25, -3.7} {
				scaled := make([]float32, len(x))
				for i, v := range x {
					scaled[i] = v * scale
				}
				_, want := d.narrow(scaled, dt)
				src, dst := d.floats(x), d.allocate(len(x)*dt.Size())
				require.NoError(d, k.Store(dst, dt, src, len(x), scale))
				got := make([]float32, len(x))
				require.NoError(d, dtype.ToFloat32(got, d.download(dst, len(x)*dt.Size()), dt))
				d.equalFloats(want, got, "%v times %v", dt, scale)
				if dt == dtype.F32 {
					require.NoError(d, k.Store(src, dt, src, len(x), scale))
					d.equalFloats(want, d.readFloats(src, len(x)), "in place, times %v", scale)
				}
			}
		}
	})
}

func testScale(d *device) {
	k := d.kernels()
	d.eachGradient(func(d *device, x []float32) {
		for _, s := range []float32{0, 1, -.3, float32(math.Inf(1))} {
			ptr := d.floats(x)
			require.NoError(d, k.Scale(ptr, len(x), s))
			want := make([]float32, len(x))
			for i, v := range x {
				want[i] = v * s
			}
			d.equalFloats(want, d.readFloats(ptr, len(x)), "times %v", s)
		}
	})
}

// magnitude is the order that the contract of Kernels defines.
func magnitude(v float32) uint32 { return math.Float32bits(v) &^ (1 << 31) }

// entries are picked entries of an array.
type entries struct {
	idx []int32
	val []float32
}

// pick returns the entries at the positions, which it sorts.
func pick(x []float32, positions []int32) entries {
	slices.Sort(positions)
	e := entries{idx: positions}
	for _, i := range positions {
		e.val = append(e.val, x[i])
	}
	return e
}

func (d *device) equalEntries(want entries, idx, val uintptr, what string, args ...any) {
	d.Helper()
	got := d.readIndices(idx, len(want.idx))
	if i := slices.Compare(want.idx, got); i != 0 {
		d.Logf(what, args...)
		d.Fatalf("indices differ (seed %d):\ngot  %.200v\nwant %.200v", Seed, got, want.idx)
	}
	d.equalFloats(want.val, d.readFloats(val, len(want.val)), what, args...)
}

func testTopK(d *device) {
	k := d.kernels()
	d.eachGradient(func(d *device, x []float32) {
		n := len(x)
		ptr, idx, val := d.floats(x), d.allocate(4*n), d.allocate(4*n)
		order := make([]int32, n)
		for i := range order {
			order[i] = int32(i)
		}
		slices.SortStableFunc(order, func(a, b int32) int { return int(magnitude(x[b])) - int(magnitude(x[a])) })
		for _, want := range []int{0, 1, 2, n / 100, n / 3, n - 1, n, n + 5} {
			if want < 0 {
				continue
			}
			top := order[:min(want, n)]
			threshold := float32(0)
			if len(top) > 0 {
				threshold = math.Float32frombits(magnitude(x[top[len(top)-1]]))
			}
			count, got, err := k.TopK(ptr, n, want, idx, val)
			require.NoError(d, err)
			require.Equal(d, len(top), count)
			d.equalFloats([]float32{threshold}, []float32{got}, "threshold of top %d", want)
			d.equalEntries(pick(x, slices.Clone(top)), idx, val, "top %d", want)
		}
		d.equalFloats(x, d.readFloats(ptr, n), "the input stays as it was")
	})
}

func testSelect(d *device) {
	k := d.kernels()
	d.eachGradient(func(d *device, x []float32) {
		n := len(x)
		ptr := d.floats(x)
		for _, threshold := range []float32{0, math.SmallestNonzeroFloat32, .5, 1.5, 3, 1000, math.MaxFloat32, float32(math.Inf(1))} {
			var above []int32
			for i, v := range x {
				if magnitude(v) >= magnitude(threshold) {
					above = append(above, int32(i))
				}
			}
			total, err := k.CountAbove(ptr, n, threshold)
			require.NoError(d, err)
			require.Equal(d, len(above), total, "above %v", threshold)
			for _, capacity := range []int{n + 3, len(above), len(above) / 2, min(1, len(above)), 0} {
				idx, val := d.allocate(4*capacity), d.allocate(4*capacity)
				total, err := k.Select(ptr, n, threshold, idx, val, capacity)
				require.NoError(d, err)
				require.Equal(d, len(above), total, "selected at %v with room for %d", threshold, capacity)
				kept := above[:min(capacity, len(above))]
				d.equalEntries(pick(x, slices.Clone(kept)), idx, val, "threshold %v, room for %d", threshold, capacity)
			}
		}
	})
}

func testMoments(d *device) {
	k := d.kernels()
	d.eachGradient(func(d *device, x []float32) {
		ptr := d.floats(x)
		var sum, squares, deviations float64
		for _, v := range x {
			sum += float64(v)
			squares += float64(v) * float64(v)
		}
		mean := sum / float64(max(len(x), 1))
		for _, v := range x {
			deviations += (float64(v) - mean) * (float64(v) - mean)
		}
		std := math.Sqrt(deviations / float64(max(len(x), 1)))

		gotMean, gotStd, err := k.MeanStd(ptr, len(x))
		require.NoError(d, err)
		gotSquares, err := k.SumSquares(ptr, len(x))
		require.NoError(d, err)
		// The mean may cancel; its error is measured against the terms.
		scale := math.Sqrt(squares / float64(max(len(x), 1)))
		d.near(mean, gotMean, scale, "mean")
		d.near(std, gotStd, scale, "standard deviation")
		d.near(squares, gotSquares, squares, "sum of squares")
	})
}

// near compares with a relative error of 1e-5, well above what sums formed in
// float32 by blocks need; infinite and NaN references only ask for the same
// kind of result.
func (d *device) near(want, got, scale float64, what string) {
	d.Helper()
	if math.IsNaN(want) || math.IsInf(want, 0) {
		require.True(d, math.IsNaN(got) || math.IsInf(got, 0), "%s: got %v, want %v", what, got, want)
		return
	}
	require.InDelta(d, want, got, 1e-5*scale, "%s (seed %d)", what, Seed)
}

// randomList returns m distinct ascending indices below n (all, if m > n).
func (d *device) randomList(m, n int) []int32 {
	list := make([]int32, 0, m)
	for i := range n {
		if d.rng.IntN(n-i) < m-len(list) {
			list = append(list, int32(i))
		}
	}
	return list
}

func testScatter(d *device) {
	k := d.kernels()
	for _, n := range kernelSizes {
		for _, m := range []int{0, 1, n / 10, n} {
			d.each(func(d *device) {
				list := d.randomList(m, n)
				m := len(list)
				x, v := d.gradient("special", n), d.gradient("special", m)
				idx, val := d.indices(list), d.floats(v)
				added, set, zeroed := slices.Clone(x), slices.Clone(x), slices.Clone(x)
				for j, i := range list {
					added[i] += v[j]
					set[i] = v[j]
					zeroed[i] = 0
				}
				dst := d.floats(x)
				require.NoError(d, k.ScatterAdd(dst, n, idx, val, m))
				d.equalFloats(added, d.readFloats(dst, n), "ScatterAdd")
				dst = d.floats(x)
				require.NoError(d, k.ScatterSet(dst, n, idx, val, m))
				d.equalFloats(set, d.readFloats(dst, n), "ScatterSet")
				dst = d.floats(x)
				require.NoError(d, k.ZeroAt(dst, n, idx, m))
				d.equalFloats(zeroed, d.readFloats(dst, n), "ZeroAt")

				// Gather takes any order and repeats.
				want := make([]float32, m)
				for j := range list {
					list[j] = int32(d.rng.IntN(n))
					want[j] = x[list[j]]
				}
				require.NoError(d, k.Gather(d.floats(x), n, d.indices(list), m, val))
				d.equalFloats(want, d.readFloats(val, m), "Gather")
			}, "%d of %d", m, n)
		}
	}
}

// testOutside checks that a list with an index outside the array, as a peer
// whose memory was corrupted might send it, is refused before anything is
// written, and that nothing outside the array is written in any case.
func testOutside(d *device) {
	k := d.kernels()
	const n, around = 1000, 64
	x := d.gradient("normal", around+n+around) // the array, and what lies around it
	v := d.gradient("normal", n)
	idx, val := d.allocate(4*n), d.floats(v)
	whole := d.floats(x)
	array := whole + 4*around
	for _, test := range []struct {
		name     string
		list     []int32
		ascended bool // so that its ends show what is wrong
	}{
		{"above, alone", []int32{n}, true},
		{"negative, alone", []int32{-1}, true},
		{"above", []int32{0, 5, n - 1, n + 7}, true},
		{"negative", []int32{-3, 0, 5, n - 1}, true},
		{"far above", []int32{0, math.MaxInt32}, true},
		{"far below", []int32{math.MinInt32, 0}, true},
		{"above, inside the list", []int32{0, n + 7, 5}, false},
		{"negative, inside the list", []int32{0, -7, 5}, false},
	} {
		d.each(func(d *device) {
			bytes, err := binary.Append(nil, binary.NativeEndian, test.list)
			require.NoError(d, err)
			require.NoError(d, d.CopyIn(idx, bytes))
			m := len(test.list)
			for name, err := range map[string]error{
				"ScatterAdd": k.ScatterAdd(array, n, idx, val, m),
				"ScatterSet": k.ScatterSet(array, n, idx, val, m),
				"ZeroAt":     k.ZeroAt(array, n, idx, m),
			} {
				if test.ascended || err != nil {
					require.ErrorIs(d, err, runtime.ErrArgument, name)
				}
			}
			require.ErrorIs(d, k.Gather(array, n, idx, m, val), runtime.ErrArgument)
			d.equalFloats(v, d.readFloats(val, n), "the values")
			after := d.readFloats(whole, len(x))
			d.equalFloats(x[:around], after[:around], "before the array")
			d.equalFloats(x[around+n:], after[around+n:], "behind the array")
			if test.ascended {
				d.equalFloats(x, after, "the array")
			}
		}, "%s", test.name)
	}
}

func testOffsetIndices(d *device) {
	k := d.kernels()
	for _, n := range kernelSizes {
		list := d.randomList(n/2, n)
		idx := d.indices(list)
		for _, offset := range []int32{0, 1, 1 << 20, -1 << 20, -1} {
			require.NoError(d, k.OffsetIndices(idx, len(list), offset))
			for i := range list {
				list[i] += offset
			}
			require.Equal(d, list, d.readIndices(idx, len(list)), "offset %d", offset)
		}
	}
}

func testMergeAdd(d *device) {
	k := d.kernels()
	for _, n := range kernelSizes {
		for _, share := range [][2]int{{0, 0}, {0, 2}, {3, 0}, {1, 1}, {2, 3}, {50, 50}, {1, 100}} {
			a := d.randomEntries(n/max(share[0], 1)*min(share[0], 1), n)
			b := d.randomEntries(n/max(share[1], 1)*min(share[1], 1), n)
			want := mergeAdd(a, b)
			room := 4 * (len(a.idx) + len(b.idx))
			idx, val := d.allocate(room), d.allocate(room)
			m, err := k.MergeAdd(d.indices(a.idx), d.floats(a.val), len(a.idx),
				d.indices(b.idx), d.floats(b.val), len(b.idx), idx, val)
			require.NoError(d, err)
			require.Equal(d, len(want.idx), m)
			d.equalEntries(want, idx, val, "%d and %d of %d entries", len(a.idx), len(b.idx), n)
		}
	}
}

func (d *device) randomEntries(m, n int) entries {
	e := entries{idx: d.randomList(m, n)}
	e.val = d.gradient("special", len(e.idx))
	return e
}

// mergeAdd merges by a map instead of by order.
func mergeAdd(a, b entries) entries {
	sums := make(map[int32]float32)
	for j, i := range a.idx {
		sums[i] = a.val[j]
	}
	for j, i := range b.idx {
		if v, both := sums[i]; both {
			sums[i] = v + b.val[j]
		} else {
			sums[i] = b.val[j]
		}
	}
	var merged entries
	for i := range sums {
		merged.idx = append(merged.idx, i)
	}
	slices.Sort(merged.idx)
	for _, i := range merged.idx {
		merged.val = append(merged.val, sums[i])
	}
	return merged
}

func testLowerBounds(d *device) {
	k := d.kernels()
	for _, n := range kernelSizes {
		list := d.randomList(n/3, n)
		bounds := []int32{0, 1, int32(n / 2), int32(n), math.MaxInt32, 0, -1, math.MinInt32}
		for range 20 {
			bounds = append(bounds, d.rng.Int32N(int32(n+1)))
		}
		want := make([]int, len(bounds))
		for b, bound := range bounds {
			for _, i := range list {
				if i < bound {
					want[b]++
				}
			}
		}
		got := make([]int, len(bounds))
		require.NoError(d, k.LowerBounds(d.indices(list), len(list), bounds, got))
		require.Equal(d, want, got, "seed %d: %d entries, bounds %v", Seed, len(list), bounds)
		require.NoError(d, k.LowerBounds(d.indices(list), len(list), nil, nil))
	}
}

func testKernelArguments(d *device) {
	k := d.kernels()
	p := d.floats(make([]float32, 8))
	q := d.indices([]int32{0, 1, 2, 3, 4, 5, 6, 7})
	var failures []error
	for _, n := range []int{-1, math.MaxInt32 + 1} {
		_, _, topK := k.TopK(p, n, 1, q, p)
		_, selected := k.Select(p, n, 1, q, p, 1)
		_, count := k.CountAbove(p, n, 1)
		_, _, mean := k.MeanStd(p, n)
		_, squares := k.SumSquares(p, n)
		_, mergeA := k.MergeAdd(q, p, n, q, p, 1, q, p)
		_, mergeB := k.MergeAdd(q, p, 1, q, p, n, q, p)
		failures = append(failures, topK, selected, count, mean, squares, mergeA, mergeB,
			k.Accumulate(p, p, n, dtype.F32),
			k.Store(p, dtype.F32, p, n, 1),
			k.Scale(p, n, 1),
			k.ScatterAdd(p, 8, q, p, n),
			k.ScatterAdd(p, n, q, p, 1),
			k.ScatterSet(p, 8, q, p, n),
			k.ScatterSet(p, n, q, p, 1),
			k.Gather(p, 8, q, n, p),
			k.Gather(p, n, q, 1, p),
			k.ZeroAt(p, 8, q, n),
			k.ZeroAt(p, n, q, 1),
			k.OffsetIndices(q, n, 1),
			k.LowerBounds(q, n, []int32{1}, []int{0}))
	}
	_, _, negativeK := k.TopK(p, 8, -1, q, p)
	_, negativeCapacity := k.Select(p, 8, 0, q, p, -1)
	failures = append(failures, negativeK, negativeCapacity,
		k.Scale(0, 1, 1), k.Accumulate(p, 0, 1, dtype.F32), k.ZeroAt(p, 8, 0, 1), k.ZeroAt(0, 8, q, 1),
		k.LowerBounds(q, 8, []int32{1, 2}, []int{0}))
	for i, err := range failures {
		require.ErrorIs(d, err, runtime.ErrArgument, "call %d", i)
	}
	require.ErrorIs(d, k.Accumulate(p, p, 1, dtype.I32), runtime.ErrDType)
	require.ErrorIs(d, k.Store(p, dtype.Invalid, p, 1, 1), runtime.ErrDType)
}

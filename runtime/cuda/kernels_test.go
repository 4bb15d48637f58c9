package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// bench is a runtime with arrays, made alike on several runtimes so that their
// kernels can be compared.
type bench struct {
	testing.TB
	runtime.Runtime
	kernel.Kernels
	arrays []uintptr
	bytes  []int
	lists  []kernel.Entries
	even   bool // addresses are as the runtime gives them
}

func newBench(t testing.TB, rt runtime.Runtime) *bench {
	t.Helper()
	b := &bench{TB: t, Runtime: rt, Kernels: rt.(kernel.Provider).Kernels()}
	t.Cleanup(func() {
		for _, p := range b.arrays {
			require.NoError(t, rt.Deallocate(p))
		}
		require.NoError(t, rt.Close())
	})
	return b
}

func onCPU(t testing.TB) *bench { return newBench(t, cpu.New()) }

func onGPU(t testing.TB) *bench {
	t.Helper()
	if _, err := cuda.Count(); errors.Is(err, runtime.ErrUnavailable) {
		t.Skipf("needs an NVIDIA GPU and its driver: %v", err)
	}
	rt, err := cuda.Open(0)
	require.NoError(t, err)
	return newBench(t, rt)
}

func (b *bench) Name() string { return b.TB.Name() }

// put uploads an array, at an address that is often aligned to its elements only.
func put[T any](b *bench, values []T) uintptr {
	b.Helper()
	data := hostmem.Bytes(values)
	p, err := b.Allocate(len(data) + 16)
	require.NoError(b, err)
	b.arrays, b.bytes = append(b.arrays, p), append(b.bytes, len(data)+16)
	require.NoError(b, b.Fill(p, len(data)+16, dtype.U8, 0))
	var element T
	align := max(int(unsafe.Sizeof(element)), 4)
	if !b.even {
		p += uintptr(len(b.arrays) * align % 16)
	}
	require.NoError(b, b.CopyIn(p, data))
	return p
}

func room[T any](b *bench, n int) uintptr { return put(b, make([]T, n)) }

func (b *bench) entries(n int) kernel.Entries {
	l := kernel.Entries{Idx: room[int32](b, n), Val: room[float32](b, n), N: n, Len: room[int32](b, 1)}
	b.lists = append(b.lists, l)
	return l
}

func read[T any](b *bench, p uintptr, n int) []T {
	b.Helper()
	values := make([]T, n)
	require.NoError(b, b.Synchronize(context.Background()))
	require.NoError(b, b.CopyOut(hostmem.Bytes(values), p))
	return values
}

// contents returns the bytes of all arrays. Memory of lists after their last entry is cleared first: a selection may
// leave anything there.
func (b *bench) contents() (all [][]byte) {
	for _, l := range b.lists {
		used := min(int(read[int32](b, l.Len, 1)[0]), l.N)
		for _, p := range []uintptr{l.Idx, l.Val} {
			require.NoError(b, b.Fill(p+uintptr(4*used), l.N-used, dtype.U32, 0))
		}
	}
	for i, p := range b.arrays {
		all = append(all, read[byte](b, p, b.bytes[i]))
	}
	return all
}

// normals are n elements, with some ties and special values.
func normals(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
		if i%17 == 0 {
			x[i] = float32(math.Round(float64(x[i])*8) / 8)
		}
	}
	for _, v := range []float32{float32(math.Inf(1)), math.MaxFloat32, math.SmallestNonzeroFloat32, float32(math.Copysign(0, -1))} {
		x[rng.IntN(n)] = v
	}
	return x
}

// work is what a program does with kernels, all of them. Its arrays are those of
// the bench.
type work struct {
	name string
	run  func() error
}

// program makes the arrays, from a seed alone, and returns what runs on them. It
// may be run again and again, and goes on from what the arrays hold then.
func (b *bench) program(seed uint64, n int, dt dtype.DType) []work {
	rng := rand.New(rand.NewPCG(seed, uint64(n)))
	k := max(n/100, 1)
	grads := make([]byte, n*dt.Size())
	require.NoError(b, dtype.FromFloat32(grads, dt, normals(rng, n)))
	src := kernel.Source{X: put(b, normals(rng, n)), N: n, Grad: put(b, grads), DType: dt, Factor: put(b, []float32{0.75}), Keep: room[float32](b, n), Take: true}
	plain := kernel.Source{X: put(b, normals(rng, n)), N: n}
	top, near, picked, of := b.entries(k), b.entries(2*k), b.entries(2*k), b.entries(k)
	threshold, state, used := put(b, []float32{2.6, 0}), put(b, []uint32{math.Float32bits(2.6), 0}), room[float32](b, 1)
	faults := room[int32](b, 1)
	lists, nothing := []kernel.Entries{top, near, picked, of}, []kernel.Entries{{}}
	dense, f32 := room[byte](b, n*dt.Size()), room[float32](b, n)
	array := kernel.Array{Ptr: f32, N: n, Faults: faults}
	union, big, pair, cut := b.entries(6*k), b.entries(6*k), b.entries(3*k), b.entries(k)
	thresholds, counts, bracket := room[float32](b, 40), room[int32](b, 40), room[uint32](b, 2)
	bounds, positions := put(b, []int32{0, int32(n / 3), int32(n / 2), int32(n)}), room[int32](b, 8)
	samples := room[int32](b, 16)
	one, two := b.entries(k), b.entries(5*k)
	pieces := []kernel.Piece{{From: union, Start: positions, End: positions + 4, To: one}, {From: near, Start: positions + 8, To: two},
		{From: union, Start: positions + 4, To: two}, {From: union, Start: bounds + 4, End: bounds + 8, ByIndex: true, To: two}}
	factors, quantiles := []float32{0.5, 0.8, 0.9, 1, 1.1, 1.3}, []float64{0, 0.1, 0.4, 0.5, 0.9, 0.99}
	return []work{
		{"TopK", func() error { return b.TopK(src, k, top, threshold) }},
		{"SelectNear", func() error {
			return b.SelectNear(src, k, state, kernel.Acceptance{Min: k / 2, Interval: 8, Step: 1.03}, near, used)
		}},
		{"Select", func() error { return b.Select(plain, threshold, picked) }},
		{"TopKList", func() error { return b.TopKList(near, k/2, of, 0, kernel.Array{}) }},
		{"TopKList what is outside", func() error { return b.TopKList(near, k/3, of, bounds+4, array) }},
		{"Merge", func() error {
			return b.Merge(dense, dt, n, lists, 0.3, faults, 0, kernel.Restoration{Dst: array, L: near, Taken: of})
		}},
		{"Union of nothing", func() error { return b.Union(union, n, nothing, 0.3, faults, 0) }},
		{"Union", func() error { return b.Union(union, n, lists, 0.3, faults, 0) }},
		{"Union of what is large", func() error { return b.Union(big, n, lists, 0.3, faults, threshold) }},
		{"Union of two", func() error { return b.Union(pair, n, lists[:2], 0.3, faults, threshold) }},
		{"Union of two, cut", func() error { return b.Union(cut, n, lists[:2], 0.3, faults, 0) }},
		{"Union, cut", func() error { return b.Union(cut, n, lists, 0.3, faults, 0) }},
		{"SelectList", func() error { return b.SelectList(union, threshold, picked) }},
		{"CountAbove", func() error { return b.CountAbove(union, thresholds, 40, counts) }},
		{"Narrow", func() error { return b.Narrow(bracket, 0, k, thresholds, 40) }},
		{"ScatterAdd", func() error { return b.ScatterAdd(array, union, 0.7) }},
		{"Restore", func() error { return b.Restore(array, union, near) }},
		{"ScatterZero", func() error { return b.ScatterZero(array, of) }},
		{"Accumulate", func() error {
			return b.Accumulate(kernel.Source{X: plain.X, N: n, Grad: src.Grad, DType: dt, Factor: src.Factor})
		}},
		{"Store", func() error { return b.Store(dense, dt, f32, n, 0.9, 0) }},
		{"Scale", func() error { return b.Scale(dense, dt, n, src.Factor) }},
		{"Refine", func() error { return b.Refine(plain.X, n, threshold, k, factors) }},
		{"LowerBounds", func() error { return b.LowerBounds(union, bounds, 4, positions, positions+16) }},
		{"CopyPieces", func() error { return b.CopyPieces(pieces) }},
		{"Sample", func() error { return b.Sample(union, quantiles, n, samples) }},
		{"Balance", func() error { return b.Balance(samples, 6, n, positions, 4) }},
	}
}

const seed = 20260217

// sampled reports whether a test runs a part of its cases: with emulated kernels, unless TUTTI_EXTENDED is set.
func sampled() bool {
	return os.Getenv("TUTTI_TEST_STAND_IN") != "" && os.Getenv("TUTTI_EXTENDED") == ""
}

// The kernels give the same bits as those of the CPU, whatever came before.
// (Sums in float64 may differ in their last bits, and are not among them.)
func TestKernelsEqualThoseOfTheCPU(t *testing.T) {
	sizes := []int{1, 1000, 4096, 60_001, 1 << 20, 5_000_000}
	if testing.Short() {
		sizes = []int{1, 1000, 4096, 20_001}
	}
	for i, n := range sizes {
		for j, dt := range []dtype.DType{dtype.F32, dtype.BF16, dtype.F16} {
			if sampled() && (i+j)%3 != 0 {
				continue
			}
			t.Run(fmt.Sprintf("%d %v", n, dt), func(t *testing.T) {
				gpu, host := onGPU(t), onCPU(t)
				on, off := gpu.program(seed, n, dt), host.program(seed, n, dt)
				for round := range 3 {
					for i := range on {
						require.NoError(t, on[i].run(), on[i].name)
						require.NoError(t, off[i].run(), off[i].name)
						got, want := gpu.contents(), host.contents()
						for a := range want {
							if !slices.Equal(want[a], got[a]) {
								first := 0
								for want[a][first] == got[a][first] {
									first++
								}
								t.Fatalf("%s, round %d: array %d differs at byte %d of %d (seed %d)", on[i].name, round, a, first, len(want[a]), seed)
							}
						}
					}
				}
			})
		}
	}
}

// A replayed graph does what the same calls do, whatever came before.
func TestKernelsInAGraph(t *testing.T) {
	n, rounds := 300_001, 100
	if testing.Short() {
		n, rounds = 5001, 3
	}
	eager, captured := onGPU(t), onGPU(t)
	calls, recorded := eager.program(seed, n, dtype.BF16), captured.program(seed, n, dtype.BF16)
	for i := range calls { // makes lists, and the kernels' memory
		require.NoError(t, calls[i].run(), calls[i].name)
		require.NoError(t, recorded[i].run(), recorded[i].name)
	}
	stream := captured.Runtime.(*cuda.Runtime).Stream()
	for i, w := range calls {
		for range rounds {
			require.NoError(t, w.run(), w.name)
		}
		graph, err := stream.Capture(recorded[i].run)
		require.NoError(t, err, w.name)
		for range rounds {
			require.NoError(t, graph.Launch(stream))
		}
		assert.Equal(t, eager.contents(), captured.contents(), "%s, seed %d", w.name, seed)
		require.NoError(t, graph.Close())
	}
}

// Everything together, and again: the same bits.
func TestKernelsAreDeterministic(t *testing.T) {
	const n = 3_000_003
	var want [][]byte
	for range 5 {
		b := onGPU(t)
		p := b.program(seed, n, dtype.F32)
		for range 10 {
			for _, w := range p {
				require.NoError(t, w.run(), w.name)
			}
		}
		if want == nil {
			want = b.contents()
		}
		for i, got := range b.contents() {
			if !slices.Equal(want[i], got) {
				t.Fatalf("array %d differs (seed %d)", i, seed)
			}
		}
	}
}

// A call that would have to allocate in a capture is an error, and the next call works.
func TestKernelsDoNotAllocateInACapture(t *testing.T) {
	b := onGPU(t)
	const n = 1 << 20
	src, dst := kernel.Source{X: put(b, normals(rand.New(rand.NewPCG(seed, 0)), n)), N: n}, b.entries(n/100)
	stream := b.Runtime.(*cuda.Runtime).Stream()
	topK := func() error { return b.TopK(src, n/100, dst, 0) }
	_, err := stream.Capture(topK)
	require.ErrorIs(t, err, runtime.ErrFrozen)
	assert.ErrorContains(t, err, "before the capture")
	require.NoError(t, topK())
	graph, err := stream.Capture(topK)
	require.NoError(t, err)
	require.NoError(t, graph.Launch(stream))
	require.NoError(t, b.Synchronize(context.Background()))
	require.NoError(t, graph.Close())
}

func TestKernelsDoNotAllocate(t *testing.T) {
	b := onGPU(t)
	n := 100_000
	if testing.Short() {
		n = 10_000
	}
	p := b.program(seed, n, dtype.F32)
	for _, w := range p {
		require.NoError(t, w.run(), w.name)
	}
	before := b.Stats()
	for _, w := range p {
		race.NoAllocs(t, 20, w.run, w.name)
	}
	require.NoError(t, b.Synchronize(context.Background()))
	assert.Equal(t, before, b.Stats())
}

// An array of the greatest length there is.
func TestKernelsOfALongArray(t *testing.T) {
	b := onGPU(t)
	const n = math.MaxInt32
	if free, _, err := b.Runtime.(*cuda.Runtime).MemoryInfo(); err != nil || free < 30<<30 {
		t.Skipf("needs 30 GB of free memory, there are %d: %v", free>>30, err)
	}
	x, err := b.Allocate(4*n + 4)
	require.NoError(t, err)
	b.arrays, b.bytes = append(b.arrays, x), append(b.bytes, 4)
	dense, err := b.Allocate(4*n + 4)
	require.NoError(t, err)
	b.arrays, b.bytes = append(b.arrays, dense), append(b.bytes, 4)
	positions := []int32{0, 1, 77, 1 << 30, n - 4097, n - 2, n - 1}
	values := []float32{1, -2, 3, 4, -5, 6, 7}
	list := kernel.Entries{Idx: put(b, positions), Val: put(b, values), N: len(positions)}
	for shift := range uintptr(2) { // an address that is aligned, and one that is not
		src := kernel.Source{X: x + 4*shift, N: n, Take: true}
		fill := func() {
			require.NoError(t, b.Fill(src.X, n, dtype.F32, 0.25))
			array := kernel.Array{Ptr: src.X, N: n}
			require.NoError(t, errors.Join(b.ScatterZero(array, list), b.ScatterAdd(array, list, 1)))
		}
		state, used := put(b, []uint32{math.Float32bits(0.5), 0}), room[float32](b, 1)
		for name, run := range map[string]func(dst kernel.Entries) error{
			"Select":           func(dst kernel.Entries) error { return b.Select(src, put(b, []float32{1}), dst) },
			"TopK":             func(dst kernel.Entries) error { return b.TopK(src, 7, dst, 0) },
			"TopK, good guess": func(dst kernel.Entries) error { return b.TopK(src, 7, dst, put(b, []float32{1, 0})) },
			"TopK, bad guess":  func(dst kernel.Entries) error { return b.TopK(src, 7, dst, put(b, []float32{5, 0})) },
			"TopK, low guess":  func(dst kernel.Entries) error { return b.TopK(src, 7, dst, put(b, []float32{0.25, 0})) },
			"SelectNear":       func(dst kernel.Entries) error { return b.SelectNear(src, 7, state, kernel.Acceptance{}, dst, used) },
		} {
			fill()
			dst := b.entries(9)
			require.NoError(t, run(dst), name)
			require.Equal(t, []int32{7}, read[int32](b, dst.Len, 1), name)
			require.Equal(t, positions, read[int32](b, dst.Idx, 7), name)
			require.Equal(t, values, read[float32](b, dst.Val, 7), name)
			left := b.entries(1)
			require.NoError(t, b.Select(src, put(b, []float32{0.5}), left))
			require.Equal(t, []int32{0}, read[int32](b, left.Len, 1), "%s: all were taken", name)
			last := read[float32](b, src.X+4*(n-3), 3)
			require.Equal(t, []float32{0.25, 0, 0}, last, name)
		}
		require.NoError(t, b.Merge(dense+4*shift, dtype.F32, n, []kernel.Entries{list, list}, 0.5, 0, 0, kernel.Restoration{}))
		merged, united := b.entries(9), b.entries(14)
		require.NoError(t, b.Select(kernel.Source{X: dense + 4*shift, N: n}, put(b, []float32{0.5}), merged))
		require.NoError(t, b.Union(united, n, []kernel.Entries{list, list}, 0.5, 0, 0))
		for _, l := range []kernel.Entries{merged, united} {
			require.Equal(t, []int32{7}, read[int32](b, l.Len, 1))
			require.Equal(t, positions, read[int32](b, l.Idx, 7))
			require.Equal(t, values, read[float32](b, l.Val, 7))
		}
		sum := room[float64](b, 1)
		require.NoError(t, b.SumSquares(dense+4*shift, dtype.F32, n, sum))
		require.Equal(t, []float64{140}, read[float64](b, sum, 1))
		threshold := room[float32](b, 1)
		require.NoError(t, b.Fit(kernel.Source{X: dense + 4*shift, N: n}, 0, threshold))
		require.InEpsilon(t, 14.0/n, float64(read[float32](b, threshold, 1)[0]), 1e-6)
	}
}

// BenchmarkKernels times kernels on the device's own clock, ten to a graph, with
// the bytes that they have to move beside those that a copy moves in the same
// time.
func BenchmarkKernels(b *testing.B) {
	fmt.Println("| elements | kernel | us | floor | x floor | x r += g |\n| ---: | --- | ---: | ---: | ---: | ---: |")
	for _, n := range []int{1 << 20, 26_214_400, 104_857_600} {
		benchmarkKernels(b, n)
	}
}

func benchmarkKernels(b *testing.B, n int) {
	g := onGPU(b)
	g.even = true
	rng := rand.New(rand.NewPCG(seed, 0))
	k := n / 100
	sample := make([]float32, n)
	for i := range sample {
		sample[i] = float32(rng.NormFloat64())
	}
	// A gradient a call, each by four elements further into the array.
	const fresh = 64
	more := append(slices.Clone(sample), sample[:min(n, 4*fresh)]...)
	x, grad := put(g, sample), put(g, more)
	y := room[float32](g, n)
	half := room[uint16](g, len(more))
	require.NoError(b, g.Store(half, dtype.BF16, grad, len(more), 1, 0))
	dst, again := g.entries(2*k), g.entries(2*k)
	threshold, exact := put(g, []float32{2.5758293, 0}), put(g, []float32{2.5758293})
	state := put(g, []uint32{math.Float32bits(2.5758293), 0})
	one, sum := put(g, []float32{1}), room[float64](g, 1)
	faults := room[int32](g, 1)
	src := kernel.Source{X: x, N: n}
	taken, added, halved := src, src, src
	taken.Take = true
	added.X, added.Grad, added.DType, added.Take = y, grad, dtype.F32, true
	halved.X, halved.Grad, halved.DType, halved.Take = y, half, dtype.BF16, true
	near := kernel.Acceptance{Min: k / 4, Step: 1.02}
	calls := 0
	next := func(src kernel.Source) kernel.Source {
		calls++
		src.Grad += uintptr(4 * src.DType.Size() * (calls % fresh))
		return src
	}
	factors := []float32{0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6}
	require.NoError(b, g.Select(src, exact, dst))
	require.NoError(b, g.Select(kernel.Source{X: grad, N: n}, exact, again))
	lists := []kernel.Entries{dst, again}
	array := kernel.Array{Ptr: y, N: n, Faults: faults}
	union, of := g.entries(4*k), g.entries(k)
	restore := func(src kernel.Source) error { return g.ScatterAdd(kernel.Array{Ptr: src.X, N: n}, dst, 1) }
	floor, plain := math.NaN(), math.NaN() // a copy's bytes a microsecond, and r += g
	for _, c := range []struct {
		name  string
		bytes int
		run   func() error
	}{
		{"copy", 8 * n, func() error { return g.Copy(y, x, 4*n) }},
		{"Accumulate f32", 12 * n, func() error { return g.Accumulate(added) }},
		{"Accumulate bf16", 10 * n, func() error { return g.Accumulate(halved) }},
		{"Store f32", 8 * n, func() error { return g.Store(y, dtype.F32, x, n, 0.5, 0) }},
		{"Store bf16", 6 * n, func() error { return g.Store(half, dtype.BF16, x, n, 0.5, 0) }},
		{"Scale f32", 8 * n, func() error { return g.Scale(y, dtype.F32, n, one) }},
		{"SumSquares", 4 * n, func() error { return g.SumSquares(x, dtype.F32, n, sum) }},
		{"Fit", 4 * n, func() error { return g.Fit(src, 2.5, threshold) }},
		{"Refine", 4 * n, func() error { return g.Refine(x, n, exact, k, factors) }},
		{"Select", 4 * n, func() error { return g.Select(src, exact, dst) }},
		{"ScatterAdd of what was taken, 1%", 16 * k, func() error { return restore(src) }},
		{"Select take + ScatterAdd", 4*n + 24*k, func() error { return errors.Join(g.Select(taken, exact, dst), restore(taken)) }},
		{"TopK", 4 * n, func() error { return g.TopK(src, k, of, threshold) }},
		{"TopK no guess", 4 * n, func() error { return g.TopK(src, k, of, 0) }},
		{"SelectNear", 4 * n, func() error { return g.SelectNear(src, k, state, near, dst, 0) }},
		{"SelectNear take + ScatterAdd", 4*n + 24*k, func() error {
			return errors.Join(g.SelectNear(taken, k, state, near, dst, 0), restore(taken))
		}},
		{"TopK += f32 take", 12 * n, func() error { return g.TopK(next(added), k, of, threshold) }},
		{"TopK += bf16 take", 10 * n, func() error { return g.TopK(next(halved), k, of, threshold) }},
		{"SelectNear += f32 take", 12 * n, func() error { return g.SelectNear(next(added), k, state, near, dst, 0) }},
		{"SelectNear += bf16 take", 10 * n, func() error { return g.SelectNear(next(halved), k, state, near, dst, 0) }},
		{"Merge f32, 2 lists", 4*n + 16*k, func() error { return g.Merge(y, dtype.F32, n, lists, 0.5, faults, 0, kernel.Restoration{}) }},
		{"Merge bf16, 2 lists", 2*n + 16*k, func() error { return g.Merge(half, dtype.BF16, n, lists, 0.5, faults, 0, kernel.Restoration{}) }},
		{"Merge f32, 8 lists", 4*n + 64*k, func() error {
			return g.Merge(y, dtype.F32, n, slices.Concat(lists, lists, lists, lists), 0.5, faults, 0, kernel.Restoration{})
		}},
		{"Union, 2 lists", 32 * k, func() error { return g.Union(union, n, lists, 0.5, faults, 0) }},
		{"TopKList", 8 * k, func() error { return g.TopKList(dst, k/2, of, 0, kernel.Array{}) }},
		{"SelectList", 8 * k, func() error { return g.SelectList(dst, exact, again) }},
		{"CountAbove 16", 4 * k, func() error { return g.CountAbove(dst, x, 16, again.Idx) }},
		{"ScatterAdd 1%", 16 * k, func() error { return g.ScatterAdd(array, dst, 0.5) }},
		{"Restore 1%", 20 * k, func() error { return g.Restore(array, dst, again) }},
		{"ScatterZero 1%", 8 * k, func() error { return g.ScatterZero(array, dst) }},
	} {
		for range 300 { // memory, and a residual and a threshold that are as they stay
			require.NoError(b, c.run(), c.name)
		}
		us := graphTime(g, c.run)
		switch c.name {
		case "copy":
			floor = float64(c.bytes) / us
		case "Accumulate f32":
			plain = us
		}
		fmt.Printf("| %d | %s | %.1f | %.1f | %.2f | %.2f |\n", n, c.name, us, float64(c.bytes)/floor, us/(float64(c.bytes)/floor), us/plain)
	}
}

// graphTime is what a call takes on the device's clock, in microseconds: ten to a
// graph, the median of 15.
func graphTime(g *bench, run func() error) float64 {
	g.Helper()
	rt := g.Runtime.(*cuda.Runtime)
	for range 3 {
		require.NoError(g, run())
	}
	const calls, rounds = 10, 15
	graph, err := rt.Stream().Capture(func() (err error) {
		for range calls {
			err = errors.Join(err, run())
		}
		return err
	})
	require.NoError(g, err)
	var times []time.Duration
	for range rounds {
		start, err := rt.NewTimingEvent()
		require.NoError(g, err)
		end, err := rt.NewTimingEvent()
		require.NoError(g, err)
		require.NoError(g, errors.Join(rt.Stream().Record(start), graph.Launch(rt.Stream()), rt.Stream().Record(end)))
		require.NoError(g, rt.Synchronize(context.Background()))
		d, err := end.Since(start)
		require.NoError(g, errors.Join(err, start.Close(), end.Close()))
		times = append(times, d)
	}
	require.NoError(g, graph.Close())
	slices.Sort(times)
	return float64(times[rounds/2].Nanoseconds()) / 1e3 / calls
}

// Two goroutines replay graphs with kernels of one runtime, which share memory, on different streams: each gives the
// entries that the same call gives alone.
func TestKernelsOfGraphsOfTwoGoroutines(t *testing.T) {
	n, rounds, launches := 26_214_400, 100, 50
	if testing.Short() {
		n, rounds, launches = 1<<20, 10, 10
	}
	b := onGPU(t)
	rt := b.Runtime.(*cuda.Runtime)
	k := n / 100
	type goroutine struct {
		dst    kernel.Entries
		stream *cuda.Stream
		graph  *cuda.Graph
		want   [][]byte
	}
	entries := func(e kernel.Entries) (parts [][]byte) {
		for _, p := range []uintptr{e.Idx, e.Val} {
			part := make([]byte, 4*k)
			require.NoError(t, rt.CopyOut(part, p))
			parts = append(parts, part)
		}
		return parts
	}
	both := make([]*goroutine, 2)
	for i := range both {
		src := kernel.Source{X: put(b, normals(rand.New(rand.NewPCG(seed, uint64(i))), n)), N: n}
		g := &goroutine{dst: b.entries(k)}
		threshold := put(b, make([]float32, 2))
		topK := func() error { return b.TopK(src, k, g.dst, threshold) }
		require.NoError(t, topK())
		require.NoError(t, topK(), "with a threshold")
		g.want = entries(g.dst)
		var err error
		g.stream, err = rt.NewStream(0)
		require.NoError(t, err)
		g.graph, err = rt.Stream().Capture(topK)
		require.NoError(t, err)
		both[i] = g
	}
	for round := range rounds {
		var running sync.WaitGroup
		for _, g := range both {
			running.Go(func() {
				for range launches {
					assert.NoError(t, g.graph.Launch(g.stream))
				}
			})
		}
		running.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		for _, g := range both {
			require.NoError(t, g.stream.Synchronize(ctx))
		}
		cancel()
		for i, g := range both {
			for j, got := range entries(g.dst) {
				if !slices.Equal(g.want[j], got) {
					t.Fatalf("goroutine %d has another list after round %d (seed %d)", i, round, seed)
				}
			}
		}
	}
	for _, g := range both {
		require.NoError(t, g.graph.Close())
	}
}

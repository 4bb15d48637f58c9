package runtimetest

import (
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// kernelTests are in the files kernels_*.go; here is what they share. Every
// buffer lies at an odd address between bytes that must stay, and lists say in different
// ways how long they are.
var kernelTests = []test{
	{"accumulate", testAccumulate},
	{"store", testStore},
	{"scale", testScale},
	{"sum of squares", testSumSquares},
	{"clip factor", testClipFactor},
	{"copy if", testCopyIf},
	{"top k", testTopK},
	{"select", testSelect},
	{"top k step by step", testTopKSteps},
	{"select near", testSelectNear},
	{"fit", testFit},
	{"refine", testRefine},
	{"long array", testLong},
	{"top of list", testTopKList},
	{"above of list", testSelectList},
	{"count above", testCountAbove},
	{"narrow", testNarrow},
	{"merge", func(d *device) { d.eachLists((*device).checkMerge) }},
	{"union", func(d *device) { d.eachLists((*device).checkUnion) }},
	{"scatter", testScatter},
	{"restore", testRestore},
	{"lower bounds", testLowerBounds},
	{"copy pieces", testCopyPieces},
	{"sample", testSample},
	{"balance", testBalance},
	{"hostile lists", testHostile},
	{"bad arguments", testKernelArguments},
	{"top k of chunks", testTopKChunks},
	{"encode and decode", testEncode},
	{"encode into little room", testEncodeRoom},
	{"hostile codes", testHostileCodes},
	{"quantize", testQuantize},
	{"bad lengths of codecs", testCodecLengths},
	{"codecs that do not exist", testCodecNames},
	{"bad arguments of codecs", testCodecArguments},
	{"bad types of codecs", testCodecTypes},
	{"fixed point", testFixed},
}

// kernels returns the kernels of the runtime, or skips the test.
func (d *device) kernels() kernel.Kernels {
	p, ok := d.Runtime.(kernel.Provider)
	if !ok {
		d.Skip("the runtime has no kernels")
	}
	return p.Kernels()
}

// word is an element of an array in device memory.
type word interface {
	int32 | uint8 | uint16 | uint32 | uint64 | float32 | float64
}

// place uploads an array to an address that is aligned to its elements only,
// and lets the end of the test look at the memory around it.
func place[T word](d *device, values []T) uintptr {
	var zero T
	size := int(unsafe.Sizeof(zero))
	shift := size * d.rng.IntN(guard/size)
	data := make([]byte, guard+shift, 2*guard+shift+size*len(values))
	for i := range data {
		data[i] = 0xa5
	}
	data = append(data, hostmem.Bytes(values)...)
	for range guard {
		data = append(data, 0xa5)
	}
	base := d.upload(data)
	end := len(data) - guard
	d.Cleanup(func() {
		if d.Failed() {
			return
		}
		head := d.download(base, guard+shift)
		require.Equal(d, data[:guard+shift], head, "memory before an array, seed %d", Seed)
		tail := d.download(base+uintptr(end), guard)
		require.Equal(d, data[end:], tail, "memory behind an array, seed %d", Seed)
	})
	return base + uintptr(guard+shift)
}

// read returns n elements at an address, when the device is done.
func read[T word](d *device, ptr uintptr, n int) []T {
	d.synchronize()
	values := make([]T, n)
	require.NoError(d, d.CopyOut(hostmem.Bytes(values), ptr))
	return values
}

// readOne returns the number at an address.
func readOne[T word](d *device, ptr uintptr) T {
	return read[T](d, ptr, 1)[0]
}

// equalFloats compares by bits, except that all NaNs are equal.
func (d *device) equalFloats(want, got []float32, format string, args ...any) {
	require.Len(d, got, len(want))
	for i := range want {
		if sameFloat(want[i], got[i]) {
			continue
		}
		d.Logf(format, args...)
		d.fail("element %d of %d: got %v, want %v (seed %d)", i, len(want), got[i], want[i], Seed)
	}
}

// equalArray compares an array on the device with want, as equalFloats does.
func (d *device) equalArray(want []float32, ptr uintptr, format string, args ...any) {
	got := read[float32](d, ptr, len(want))
	d.equalFloats(want, got, format, args...)
}

// equalFaults compares the number of faults at an address.
func (d *device) equalFaults(want int32, ptr uintptr) {
	got := readOne[int32](d, ptr)
	require.Equal(d, want, got, "faults, seed %d", Seed)
}

// coin draws one of two.
func (d *device) coin() bool { return d.rng.IntN(2) == 0 }

// draw returns one of the values.
func draw[T any](d *device, values ...T) T {
	return values[d.rng.IntN(len(values))]
}

// sameFloat compares by bits, except that all NaNs are equal.
func sameFloat(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

// sum and product round once: float64 holds both exactly enough, and no
// compiler fuses them.
func sum(a, b float32) float32 { return float32(float64(a) + float64(b)) }

func product(a, b float32) float32 { return float32(float64(a) * float64(b)) }

// tiny is the smallest magnitude above zero.
const tiny = math.SmallestNonzeroFloat32

var (
	inf = float32(math.Inf(1))
	nan = float32(math.NaN())
)

// specialValues are numbers that arithmetic treats specially.
var specialValues = []float32{nan, inf, -inf, 0, float32(math.Copysign(0, -1)), tiny, -math.MaxFloat32, 0x1p-126}

// gradients are the inputs that kernels are tried on: element i of n.
var gradients = []struct {
	name    string
	element func(rng *rand.Rand, i, n int) float32
}{
	{"normal", func(rng *rand.Rand, _, _ int) float32 { return float32(rng.NormFloat64()) }},
	{"ties", func(rng *rand.Rand, _, _ int) float32 { return float32(rng.IntN(7) - 3) }},
	{"equal", func(*rand.Rand, int, int) float32 { return -1.5 }},
	{"zero", func(*rand.Rand, int, int) float32 { return 0 }},
	{"ascending", func(_ *rand.Rand, i, _ int) float32 { return float32(i) }},
	{"descending", func(_ *rand.Rand, i, n int) float32 { return float32(n - i) }},
	{"wide", func(rng *rand.Rand, _, _ int) float32 { return float32(math.Exp2(float64(rng.IntN(250) - 125))) }},
	{"denormal", func(rng *rand.Rand, _, _ int) float32 { return math.Float32frombits(rng.Uint32N(5000)) }},
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
		if g.name != name {
			continue
		}
		x := make([]float32, n)
		for i := range x {
			x[i] = g.element(d.rng, i, n)
		}
		return x
	}
	d.fail("no gradient is named %q", name)
	return nil
}

// extended asks for what takes long.
var extended = os.Getenv("TUTTI_EXTENDED") != ""

// leftOut reports whether case i of a product is left to another size, as size number s is one of the two
// largest: each case has one of these, a third of them the largest, unless TUTTI_EXTENDED is set.
func leftOut(s, i int) bool {
	last := len(kernelSizes()) - 1
	return !extended && s >= last-1 && (s == last) != (i%3 == 0)
}

// eachGradient runs f on every gradient of every size, [leftOut] of the largest.
func (d *device) eachGradient(f func(d *device, x []float32)) {
	for i := range kernelSizes() {
		d.gradientsOf(i, leftOut, f)
	}
}

// eachSmallGradient is eachGradient of all sizes but the largest, unless TUTTI_EXTENDED is set.
func (d *device) eachSmallGradient(f func(d *device, x []float32)) {
	if extended {
		d.eachGradient(f)
		return
	}
	for i := range len(kernelSizes()) - 1 {
		d.gradientsOf(i, func(int, int) bool { return false }, f)
	}
}

// gradientsOf runs f on the gradients of a size, by its number, that are not left out.
func (d *device) gradientsOf(size int, out func(size, gradient int) bool, f func(d *device, x []float32)) {
	n := kernelSizes()[size]
	for j, g := range gradients {
		if !out(size, j) {
			d.subtest(func(d *device) { f(d, d.gradient(g.name, n)) }, "%d %s", n, g.name)
		}
	}
}

// gradientTypes are the dtypes of gradients.
var gradientTypes = []dtype.DType{dtype.F32, dtype.F16, dtype.BF16}

// narrow returns the values that x has in dt, and the address of an array of
// them.
func (d *device) narrow(x []float32, dt dtype.DType) (values []float32, ptr uintptr) {
	bytes := make([]byte, len(x)*dt.Size())
	values = make([]float32, len(x))
	require.NoError(d, dtype.FromFloat32(bytes, dt, x))
	require.NoError(d, dtype.ToFloat32(values, bytes, dt))
	if dt == dtype.F32 {
		return values, place(d, x)
	}
	halves := make([]uint16, len(x))
	copy(hostmem.Bytes(halves), bytes)
	return values, place(d, halves)
}

// readNarrow returns n elements of type dt as float32.
func (d *device) readNarrow(ptr uintptr, dt dtype.DType, n int) []float32 {
	d.synchronize()
	values := make([]float32, n)
	require.NoError(d, dtype.ToFloat32(values, d.download(ptr, n*dt.Size()), dt))
	return values
}

// largest are the largest numbers of gradients, by type.
var largest = map[dtype.DType]float64{
	dtype.F32:  math.MaxFloat32,
	dtype.F16:  65504,
	dtype.BF16: 0xff * 1 << 120,
}

// excess returns the largest numbers of dt instead of what is beyond, and an array to which the
// differences are added. Half of the time there is none, and nothing is changed: check compares it, if
// there is one.
func (d *device) excess(values []float32, dt dtype.DType) (saturated []float32, ptr uintptr, check func()) {
	if d.coin() {
		return values, 0, func() {}
	}
	excess := d.gradient("normal", len(values))
	ptr = place(d, excess)
	saturated = slices.Clone(values)
	for i, v := range values {
		x := float64(v)
		if math.Abs(x) > largest[dt] && !math.IsInf(x, 0) {
			saturated[i] = float32(math.Copysign(largest[dt], x))
			excess[i] = sum(excess[i], float32(x-float64(saturated[i])))
		}
	}
	return saturated, ptr, func() {
		d.equalArray(excess, ptr, "the excess of %v", dt)
	}
}

// magnitude is the order that the contract of Kernels defines.
func magnitude(v float32) uint32 { return math.Float32bits(v) &^ (1 << 31) }

// passes tells whether v is selected by a threshold.
func passes(v, threshold float32) bool {
	return threshold <= 0 || magnitude(v) >= magnitude(threshold)
}

// passing returns the positions of the elements that pass a threshold.
func passing(x []float32, threshold float32) (positions []int32) {
	for i, v := range x {
		if passes(v, threshold) {
			positions = append(positions, int32(i))
		}
	}
	return positions
}

// ranking returns the positions of x by magnitude, the lower one first among
// equals.
func ranking(x []float32) []int32 {
	order := make([]uint64, len(x))
	for i, v := range x {
		order[i] = uint64(^magnitude(v))<<32 | uint64(i)
	}
	slices.Sort(order)
	positions := make([]int32, len(x))
	for i, o := range order {
		positions[i] = int32(uint32(o))
	}
	return positions
}

// entries are sparse elements of an array.
type entries struct {
	idx []int32
	val []float32
}

// pick returns the entries at positions, in ascending order.
func pick(x []float32, positions []int32) entries {
	e := entries{idx: slices.Sorted(slices.Values(positions))}
	for _, i := range e.idx {
		e.val = append(e.val, x[i])
	}
	return e
}

// append adds an entry.
func (e *entries) append(index int32, value float32) {
	e.idx = append(e.idx, index)
	e.val = append(e.val, value)
}

// pick returns the entries of a list at positions, in ascending order.
func (e entries) pick(positions []int32) (part entries) {
	for _, p := range slices.Sorted(slices.Values(positions)) {
		part.append(e.idx[p], e.val[p])
	}
	return part
}

// first returns at most n entries.
func (e entries) first(n int) entries {
	return entries{e.idx[:min(n, len(e.idx))], e.val[:min(n, len(e.val))]}
}

// random returns m entries (or n, if that is less) with indices below n.
func (d *device) random(m, n int, values string) entries {
	e := entries{idx: make([]int32, 0, m)}
	for i := range n {
		if d.rng.IntN(n-i) < m-len(e.idx) {
			e.idx = append(e.idx, int32(i))
		}
	}
	e.val = d.gradient(values, len(e.idx))
	return e
}

// spoiled adds up to three entries out of range at each end, so that the
// indices still ascend.
func (d *device) spoiled(e entries, n int) (spoiled entries, faults int32) {
	low := []int32{math.MinInt32, -7, -1}[d.rng.IntN(4)%3:]
	high := []int32{int32(n), math.MaxInt32}
	high = high[:d.rng.IntN(len(high)+1)]
	spoiled.idx = slices.Concat(low, e.idx, high)
	spoiled.val = slices.Concat(make([]float32, len(low)), e.val, make([]float32, len(high)))
	for i := range low {
		spoiled.val[i] = 77
	}
	return spoiled, int32(len(low) + len(high))
}

// list uploads a list, and says its length in one of the ways there are.
func (d *device) list(e entries) kernel.Entries {
	n := len(e.idx)
	length := int32(n)
	spare := 0
	switch d.rng.IntN(3) {
	case 0:
		return kernel.Entries{
			Idx: place(d, e.idx),
			Val: place(d, e.val),
			N:   n,
		}
	case 1: // there is more room than entries
		spare = 1 + d.rng.IntN(50)
		if n == 0 {
			length = -int32(spare)
		}
	case 2: // a length above the capacity is as good as that
		length += d.rng.Int32N(50)
	}
	garbage := make([]int32, spare)
	for i := range garbage {
		garbage[i] = int32(d.rng.Uint32())
	}
	return kernel.Entries{
		Idx: place(d, slices.Concat(e.idx, garbage)),
		Val: place(d, slices.Concat(e.val, make([]float32, spare))),
		N:   n + spare,
		Len: place(d, []int32{length}),
	}
}

// lists uploads several.
func (d *device) lists(all []entries) (lists []kernel.Entries) {
	for _, e := range all {
		lists = append(lists, d.list(e))
	}
	return lists
}

// target returns room for n entries, with a length if so wanted.
func (d *device) target(n int, length bool) kernel.Entries {
	dst := kernel.Entries{
		Idx: place(d, make([]int32, n)),
		Val: place(d, make([]float32, n)),
		N:   n,
	}
	if length {
		dst.Len = place(d, []int32{-99})
	}
	return dst
}

// equalEntries compares what was selected, of which there are total, with
// entries.
func (d *device) equalEntries(want entries, total int, dst kernel.Entries, format string, args ...any) {
	if dst.Len != 0 {
		require.EqualValues(d, total, readOne[int32](d, dst.Len), "length (seed %d)", Seed)
	}
	got := read[int32](d, dst.Idx, len(want.idx))
	if slices.Compare(want.idx, got) != 0 {
		d.Logf(format, args...)
		d.fail("indices differ (seed %d):\ngot  %.200v\nwant %.200v", Seed, got, want.idx)
	}
	d.equalArray(want.val, dst.Val, format, args...)
}

// number places a factor or threshold.
func (d *device) number(v float32) uintptr { return place(d, []float32{v}) }

// input is what a kernel with a [kernel.Source] is tried on.
type input struct {
	kernel.Source
	before []float32 // of what the gradient is added to
	x      []float32 // with the gradient
}

// source places x, which is consumed, with or without a gradient, a factor,
// Take, and x apart from where the sums go.
func (d *device) source(x []float32) input {
	n := len(x)
	in := input{
		Source: kernel.Source{X: place(d, x), N: n, Take: d.coin()},
		before: x,
		x:      x,
	}
	if d.rng.IntN(3) == 0 {
		return in
	}
	// No NaN: which of two an addition returns is not defined.
	names := []string{"normal", "ties", "zero", "wide", "sparse"}
	dt := draw(d, gradientTypes...)
	grad, ptr := d.narrow(d.gradient(draw(d, names...), n), dt)
	in.Grad = ptr
	in.DType = dt
	factor := float32(1)
	if d.coin() {
		factor = draw[float32](d, -0.3, 1, 0, 1e-3)
		in.Factor = d.number(factor)
	}
	want := make([]float32, n)
	for i, v := range x {
		want[i] = sum(v, product(grad[i], factor))
	}
	if d.coin() {
		in.From = in.X
		in.X = place(d, d.gradient("special", n))
	}
	// The bits of a NaN, by which it is ranked, are the device's: so they come
	// from there.
	sums := in.Source
	if d.coin() {
		in.Keep = place(d, make([]float32, n))
	}
	sums.X = place(d, x)
	sums.From = 0
	require.NoError(d, d.Kernels.Accumulate(sums))
	in.x = read[float32](d, sums.X, n)
	d.equalFloats(want, in.x, "accumulated %v times %v", dt, factor)
	return in
}

// equalSource compares X with what it should be after taken was selected.
func (d *device) equalSource(in input, taken entries) {
	if in.From != 0 {
		d.equalArray(in.before, in.From, "what the gradient was added to")
	}
	if in.Keep != 0 {
		d.equalArray(in.before, in.Keep, "what was kept of it")
	}
	want := slices.Clone(in.x)
	if in.Take {
		for _, i := range taken.idx {
			want[i] = 0
		}
	}
	d.equalArray(want, in.X, "the source afterwards, Take is %v", in.Take)
}

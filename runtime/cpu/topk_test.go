package cpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// magnitude is the key that entries are ordered by, written down once more.
func magnitude(v float32) uint32 { return math.Float32bits(v) & 0x7fffffff }

// ranking is the indices of an array by magnitude, the lower index first among
// equals: what top-k selects from.
type ranking struct {
	order []int32
	place []int32 // of each index in order
}

func rank(x []float32) ranking {
	order := make([]uint64, len(x))
	for i, v := range x {
		order[i] = uint64(^magnitude(v))<<32 | uint64(i)
	}
	slices.Sort(order)
	r := ranking{
		order: make([]int32, len(x)),
		place: make([]int32, len(x)),
	}
	for i, o := range order {
		index := int32(uint32(o))
		r.order[i] = index
		r.place[index] = int32(i)
	}
	return r
}

// top returns the first k indices, ascending.
func (r ranking) top(k int) []int32 {
	indices := make([]int32, 0, k)
	for i, place := range r.place {
		if int(place) < k {
			indices = append(indices, int32(i))
		}
	}
	return indices
}

// checkTopK compares topK with the ranking of x for each k and looks for
// writes out of bounds.
func checkTopK(t *testing.T, x []float32, what string, ks ...int) {
	t.Helper()
	r := rank(x)
	for j, k := range ks {
		top := r.top(k)
		kth := float32(0)
		if k > 0 {
			kth = x[r.order[k-1]]
		}
		// Without a guess, and with a good or a bad one.
		for _, near := range []float32{0, []float32{kth, kth / 4, 1.1 * kth, 3 * kth}[j%4]} {
			checkTopKOnce(t, x, top, near, fmt.Sprintf("%s, k %d, guess %v", what, k, near))
		}
	}
}

func checkTopKOnce(t *testing.T, x []float32, want []int32, near float32, what string) {
	t.Helper()
	const guard = 40
	k := len(want)
	idx, val := make([]int32, k+guard), make([]float32, k+guard)
	for i := range idx {
		idx[i], val[i] = -7, -7
	}
	s := scratches.get()
	defer scratches.put(s)
	count, key := s.topK(&source{x: x}, k, entries{idx[:k], val[:k]}, guess{near, firstMargin}, true)
	require.Equal(t, k, count, what)
	require.True(t, slices.Equal(want, idx[:k]), "%s: indices", what)

	least := uint32(math.MaxUint32)
	for j, i := range want {
		if math.Float32bits(x[i]) != math.Float32bits(val[j]) {
			t.Fatalf("%s: value of entry %d is %v, want %v", what, j, val[j], x[i])
		}
		least = min(least, magnitude(x[i]))
	}
	require.Equal(t, least, key, "%s: threshold", what)
	require.Equal(t, slices.Repeat([]int32{-7}, guard), idx[k:], "%s: wrote behind the end", what)
	require.Equal(t, slices.Repeat([]float32{-7}, guard), val[k:], "%s: wrote behind the end", what)
}

// topKInputs are the shapes of data that selection is tried on: ordinary ones
// and those that defeat a bracket, a pivot or a comparison of floats.
var topKInputs = []struct {
	name string
	at   func(rng *rand.Rand, i, n int) float32
}{
	{"normal", func(rng *rand.Rand, _, _ int) float32 { return float32(rng.NormFloat64()) }},
	{"uniform", func(rng *rand.Rand, _, _ int) float32 { return rng.Float32() - 0.5 }},
	{"any bits", func(rng *rand.Rand, _, _ int) float32 { return math.Float32frombits(rng.Uint32()) }},
	{"wide range", func(rng *rand.Rand, _, _ int) float32 { return float32(math.Exp(60 * (rng.Float64() - 0.5))) }},
	{"denormals", func(rng *rand.Rand, _, _ int) float32 { return math.Float32frombits(rng.Uint32N(1000)) }},
	{"zeros", func(*rand.Rand, int, int) float32 { return 0 }},
	{"signed zeros", func(_ *rand.Rand, i, _ int) float32 { return float32(math.Copysign(0, float64(i%2)-0.5)) }},
	{"equal", func(*rand.Rand, int, int) float32 { return -3 }},
	{"NaN", func(*rand.Rand, int, int) float32 { return math.Float32frombits(0xffffffff) }},
	{"two values", func(rng *rand.Rand, _, _ int) float32 { return 1 + float32(rng.IntN(2)) }},
	{"few values", func(rng *rand.Rand, _, _ int) float32 { return float32(rng.IntN(5) - 2) }},
	{"ascending", func(_ *rand.Rand, i, _ int) float32 { return float32(i) }},
	{"descending", func(_ *rand.Rand, i, n int) float32 { return float32(n - i) }},
	{"adjacent keys", func(_ *rand.Rand, i, _ int) float32 { return math.Float32frombits(0x3f800000 + uint32(i)) }},
	{"organ pipe", func(_ *rand.Rand, i, n int) float32 { return float32(min(i, n-i)) }},
	{"mostly zero", func(rng *rand.Rand, _, _ int) float32 {
		if rng.IntN(200) > 0 {
			return 0
		}
		return float32(rng.NormFloat64())
	}},
	{"clustered", func(rng *rand.Rand, i, n int) float32 {
		if i > n/3 && i < n/3+n/50 {
			return float32(100 * rng.NormFloat64())
		}
		return float32(rng.NormFloat64())
	}},
	{"NaN and Inf", func(rng *rand.Rand, _, _ int) float32 {
		switch rng.IntN(50) {
		case 0:
			return float32(math.Inf(1 - 2*rng.IntN(2)))
		case 1:
			return math.Float32frombits(0x7f800001 + rng.Uint32N(3) + uint32(rng.IntN(2))<<31)
		}
		return float32(rng.NormFloat64())
	}},
	{"periodic", func(_ *rand.Rand, i, _ int) float32 { return float32(i % 64) }},
}

func TestTopK(t *testing.T) {
	const seed = 11
	lengths := []int{1, 2, 31, 32, 100, 5000, sampleFrom - 1, sampleFrom, 20_000, 150_001}
	if race.Enabled { // one goroutine: the detector sees nothing new, slowly
		lengths = lengths[:len(lengths)-2]
	}
	for _, n := range lengths {
		for _, input := range topKInputs {
			rng := rand.New(rand.NewPCG(seed, uint64(n)))
			x := make([]float32, n)
			for i := range x {
				x[i] = input.at(rng, i, n)
			}
			checkTopK(t, x, fmt.Sprintf("%s, n %d, seed %d", input.name, n, seed),
				1, 1+n/1000, 1+n/100, 1+n/9, 1+n/2, 1+rng.IntN(n), max(n-1, 1), n)
		}
	}
}

// TestTopKTies cuts in the middle of equal magnitudes of both signs.
func TestTopKTies(t *testing.T) {
	const seed = 12
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, n := range []int{1000, 200_000} {
		x := make([]float32, n)
		larger := 0
		for i := range x {
			switch rng.IntN(10) {
			case 0:
				x[i] = 5 + rng.Float32()
				larger++
			case 1, 2, 3:
				x[i] = 4 * float32(1-2*rng.IntN(2))
			default:
				x[i] = rng.Float32()
			}
		}
		checkTopK(t, x, fmt.Sprintf("n %d, seed %d", n, seed),
			larger-1, larger, larger+1, larger+n/10, larger+n/5)
	}
}

// TestTopKMisleadingSample gives the sampled positions values that have
// nothing to do with the others, so that the bracket lies far off.
func TestTopKMisleadingSample(t *testing.T) {
	const n, seed = 200_000, 13
	positions := make([]float32, n)
	for i := range positions {
		positions[i] = float32(i) // exact: n < 2^24
	}
	var s scratch
	s.takeSample(positions, n/sampleSpacing)
	sampled := make(map[int]bool, len(s.sample))
	for _, p := range s.sample {
		sampled[int(p)] = true
	}
	require.Len(t, sampled, n/sampleSpacing, "positions are distinct")

	for _, scale := range []float32{0, 1e-10, 1e10, float32(math.Inf(1))} {
		rng := rand.New(rand.NewPCG(seed, 0))
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(rng.NormFloat64())
			if sampled[i] {
				x[i] *= scale
			}
		}
		checkTopK(t, x, fmt.Sprintf("sampled values times %v, seed %d", scale, seed),
			1, n/100, n/sampleSpacing, n/2)
	}
}

// TestTopKPastFloatIntegers selects entries whose indices float32 cannot hold.
func TestTopKPastFloatIntegers(t *testing.T) {
	if race.Enabled {
		t.Skip("16 million elements in one goroutine are slow under the race detector, which has nothing to see there")
	}
	const n = 1<<24 + 77
	x := make([]float32, n)
	want := []int32{3, 1<<24 - 1, 1 << 24, 1<<24 + 1, 1<<24 + 3, 1<<24 + 41, 1<<24 + 43, n - 1}
	for j, i := range want {
		x[i] = float32(j - 20)
	}
	top := func(k int) (idx []int32, val []float32, threshold float32) {
		dst := entries{make([]int32, k), make([]float32, k)}
		var s scratch
		count, key := s.topK(&source{x: x}, k, dst, guess{}, true)
		require.Equal(t, k, count)
		return dst.idx, dst.val, math.Float32frombits(key)
	}
	idx, val, threshold := top(len(want))
	assert.Equal(t, float32(13), threshold)
	assert.Equal(t, want, idx)
	for j := range want {
		assert.Equal(t, float32(j-20), val[j])
	}
	// Ties at zero: the lowest indices are taken first.
	idx, _, threshold = top(1000)
	assert.Zero(t, threshold)
	assert.Equal(t, want[1:], idx[len(idx)-len(want)+1:])
	for j, i := range idx[:len(idx)-len(want)+1] {
		assert.Equal(t, int32(j), i)
	}
}

func TestTopKConcurrent(t *testing.T) {
	const n, k, seed = 100_000, 1000, 14
	var group sync.WaitGroup
	for worker := range 8 {
		rng := rand.New(rand.NewPCG(seed, uint64(worker)))
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(rng.NormFloat64())
		}
		want := rank(x).top(k)
		group.Go(func() {
			dst := entries{make([]int32, k), make([]float32, k)}
			for range 5 {
				s := scratches.get()
				s.topK(&source{x: x}, k, dst, guess{}, true)
				scratches.put(s)
				assert.Equal(t, want, dst.idx, "worker %d, seed %d", worker, seed)
			}
		})
	}
	group.Wait()
}

// FuzzTopK repeats the values in data up to a length of n, so that long arrays,
// which are sampled, are reached by short inputs.
func FuzzTopK(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0}, uint32(1), uint32(1))
	f.Add([]byte{0, 0, 0x80, 0x7f, 1, 0, 0x80, 0xff, 0, 0, 0x80, 0x3f}, uint32(100), uint32(50))
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, uint32(sampleFrom+100), uint32(700))
	f.Fuzz(func(t *testing.T, data []byte, n, k uint32) {
		values := len(data) / 4
		if values == 0 {
			t.Skip("no values")
		}
		x := make([]float32, 1+n%(2*sampleFrom))
		for i := range x {
			x[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[i%values*4:]) + uint32(i/values))
		}
		checkTopK(t, x, fmt.Sprintf("%d values, n %d", values, len(x)), 1+int(k)%len(x))
	})
}

// TestChunksOfManyScales selects from chunks that have little to do with the ones before: of other scales, empty, equal,
// not finite, with few entries that matter, and as they are where gradients accumulate.
func TestChunksOfManyScales(t *testing.T) {
	const seed, size, chunks, k = 37, 512, 60, 9
	rng := rand.New(rand.NewPCG(seed, 0))
	for round := range 4 {
		w := newWorkbench(t)
		n := size*chunks - 100*round // the last chunk is shorter
		from := make([]float32, n)
		grad := make([]float32, n)
		for i := range n {
			scale := float32(math.Pow(10, float64((i/size*7)%12-6)))
			if round%2 == 0 {
				scale = 1 + float32(i/size%3)/4
			}
			grad[i] = scale * float32(rng.NormFloat64())
			switch i / size % 9 {
			case 4:
				grad[i] = 0
			case 5:
				grad[i] = scale
			case 6:
				if rng.IntN(40) > 0 {
					grad[i] = 0
				}
			case 7:
				if rng.IntN(200) == 0 {
					grad[i] = float32(math.Inf(1 - 2*rng.IntN(2)))
				}
			}
			from[i] = scale / 3
		}
		sums := make([]float32, n)
		for i := range sums {
			sums[i] = from[i] + grad[i]
		}
		var want []int32
		for begin := 0; begin < n; begin += size {
			part := sums[begin:min(begin+size, n)]
			for _, i := range rank(part).top(min(k, len(part))) {
				want = append(want, int32(begin)+i)
			}
		}
		x, kept := room[float32](w, n), room[float32](w, n)
		source := kernel.Source{X: x, N: n, Grad: put(w, grad...), DType: dtype.F32, From: put(w, from...), Keep: kept, Take: true}
		out := w.list(entries{}, len(want))
		require.NoError(t, w.TopKChunks(source, k, size, out))
		assert.Equal(t, want, hostmem.Slice[int32](out.Idx, len(want)), "seed %d, round %d", seed, round)
		assert.Equal(t, from, floats(kept, n))
		for j, i := range want {
			assert.Equal(t, math.Float32bits(sums[i]), math.Float32bits(floats(out.Val, len(want))[j]), "entry %d", i)
			sums[i] = 0
		}
		assert.Equal(t, hostmem.Bytes(sums), hostmem.Bytes(floats(x, n)), "what is left")
	}
}

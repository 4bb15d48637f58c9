package cuda_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// strewn are ascending indices in [from, to), that share of all, and values some of
// which a 16-bit type has no room for.
func strewn(rng *rand.Rand, from, to int, share float64) (idx []int32, val []float32) {
	for i := from; i < to; i++ {
		if i += int(rng.ExpFloat64() * (1/share - 1)); i >= to {
			break
		}
		v := float32(rng.NormFloat64())
		switch rng.IntN(50) {
		case 0:
			v = 1e30
		case 1:
			v = -7e4
		case 2:
			v = float32(math.Inf(1))
		case 3:
			v = math.SmallestNonzeroFloat32
		case 4:
			v = float32(math.Copysign(0, -1))
		case 5:
			v = math.MaxFloat32
		}
		idx, val = append(idx, int32(i)), append(val, v)
	}
	return idx, val
}

// Merge and Union write the bits that the CPU writes: of few entries and of many, of lists
// that have them all in one place, of more lists than windows are kept of and than
// arguments hold, and at every address.
func TestKernelsMerge(t *testing.T) {
	for _, c := range []mergeCase{
		{1, []int{0, 1, 3}, []float64{1}},
		{5, []int{1, 2}, []float64{0.5, 1}},
		{1023, []int{2, 9}, []float64{0.001, 0.3, 1}},
		{4099, []int{1, 2, 8, 9, 40}, []float64{0.001, 0.01, 0.1, 1}},
		{20_001, []int{2, 7, 8, 17}, []float64{0.01, 0.3, 1}},
		{400_003, []int{2, 9}, []float64{0.03}},   // several tiles for each warp of the stand-in
		{9_000_001, []int{2, 9}, []float64{0.03}}, // and of an H200
	} {
		if c.n > 1<<20 && (testing.Short() || os.Getenv("TUTTI_TEST_STAND_IN") != "") {
			continue
		}
		t.Run(strconv.Itoa(c.n), c.run)
	}
}

// mergeCase is a length with the numbers of lists, and the shares of all elements that a list has.
type mergeCase struct {
	n      int
	lists  []int
	shares []float64
}

func (c mergeCase) run(t *testing.T) {
	gpu := onGPU(t)
	host := onCPU(t)
	for number, count := range c.lists {
		for j, share := range c.shares {
			for k, corner := range []bool{false, true} {
				if sampled() && c.n > 1<<12 && (number+j+k)%2 > 0 {
					continue
				}
				for i, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
					if c.n > 1<<12 && testing.Short() && (count+i+j+k)%3 > 0 { // one type each
						continue
					}
					name := fmt.Sprintf("%v, %d lists of %v, in a corner: %v, seed %d", dt, count, share, corner, seed)
					want := mergeOnce(host, c.n, dt, count, share, corner)
					got := mergeOnce(gpu, c.n, dt, count, share, corner)
					for i := range want {
						require.True(t, slices.Equal(want[i], got[i]), "array %d: %s", i, name)
					}
				}
			}
		}
	}
}

// mergeOnce merges twice, at two addresses, and unites. It returns what became of the
// results, of what they have no room for, and of the count of bad indices.
func mergeOnce(b *bench, n int, dt dtype.DType, count int, share float64, corner bool) (all [][]byte) {
	rng := rand.New(rand.NewPCG(seed, uint64(n*100+count)))
	lists, room := make([]kernel.Entries, count), 0
	for i := range lists {
		from, to := 0, n
		if corner {
			if from, to = n-n/10, n; i%2 == 1 {
				from, to = 0, n/10
			}
		}
		idx, val := strewn(rng, from, to, share)
		if i%3 == 1 { // some that are not in the array, at both ends
			idx, val = slices.Concat([]int32{math.MinInt32, -3}, idx, []int32{int32(n), math.MaxInt32}), slices.Concat([]float32{1, 2}, val, []float32{3, 4})
		}
		lists[i] = kernel.Entries{Idx: put(b, idx), Val: put(b, val), N: len(idx)}
		if i%2 == 0 {
			lists[i].Len = put(b, []int32{int32(len(idx)) - int32(i/2)})
		}
		room += len(idx)
	}
	rest, given, faults := put(b, make([]float32, n)), put(b, make([]float32, n)), put(b, []int32{0})
	for shift := range 2 {
		dirty := slices.Repeat([]byte{0xa5}, (n+9)*dt.Size())
		p := put(b, dirty)
		at := (p+15)&^15 + uintptr(shift*dt.Size())
		back := kernel.Restoration{}
		if shift == 1 && count > 0 {
			back = kernel.Restoration{Dst: kernel.Array{Ptr: given, N: n, Faults: faults}, L: lists[0], Taken: lists[count-1]}
		}
		require.NoError(b, b.Merge(at, dt, n, lists, []float32{0.3, 1}[shift], faults, rest, back))
		all = append(all, read[byte](b, p, len(dirty))[at-p:])
	}
	for _, room := range []int{min(n, room), min(n, room) / 3} {
		union := b.entries(room)
		for _, threshold := range []uintptr{0, put(b, []float32{0.2})} {
			require.NoError(b, b.Union(union, n, lists, 0.3, faults, threshold))
			length := int(read[int32](b, union.Len, 1)[0])
			all = append(all, []byte(fmt.Sprint(length)), read[byte](b, union.Idx, 4*min(length, room)), read[byte](b, union.Val, 4*min(length, room)))
		}
	}
	all = append(all, read[byte](b, rest, 4*n), read[byte](b, given, 4*n), read[byte](b, faults, 4))
	for _, p := range b.arrays {
		require.NoError(b, b.Deallocate(p))
	}
	b.arrays, b.bytes, b.lists = nil, nil, nil
	return all
}

// BenchmarkMerge times Merge on the device's own clock, again and again ("warm"), and
// behind as much other traffic as an exchange and a selection make, which leave the lists
// out of the cache ("cold"), beside clearing the result.
func BenchmarkMerge(b *testing.B) {
	fmt.Println("| elements | type | lists | of them | warm us | cold us | clearing us |\n| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
	for _, n := range benchmarkSizes(b) {
		for _, every := range []int{100, 10} {
			g := onGPU(b)
			g.even = true
			all := make([]kernel.Entries, 8)
			for i := range all {
				idx, val := strewn(rand.New(rand.NewPCG(seed, uint64(i))), 0, n, 1/float64(every))
				all[i] = kernel.Entries{Idx: put(g, idx), Val: put(g, val), N: len(idx)}
			}
			dst, other, faults := room[float32](g, n), room[float32](g, n), room[int32](g, 1)
			traffic := func() error { return g.Fill(other, n, dtype.F32, 1) }
			without := graphTime(g, traffic)
			for _, dt := range []dtype.DType{dtype.F32, dtype.BF16} {
				clearing := graphTime(g, func() error { return g.Fill(dst, n*dt.Size()/4, dtype.U32, 0) })
				for _, count := range []int{1, 2, 4, 8} {
					merge := func() error { return g.Merge(dst, dt, n, all[:count], 0.5, faults, 0, kernel.Restoration{}) }
					cold := graphTime(g, func() error { return errors.Join(traffic(), merge()) })
					fmt.Printf("| %d | %v | %d | 1/%d | %.1f | %.1f | %.1f |\n", n, dt, count, every, graphTime(g, merge), cold-without, clearing)
				}
			}
		}
	}
}

// BenchmarkStep times what a step of two ranks does on one of them, but for the exchange:
// a selection and a Merge, together and each by itself.
func BenchmarkStep(b *testing.B) {
	fmt.Println("| elements | type | selection | alone us | merge us | together us | r += g us |\n| ---: | --- | --- | ---: | ---: | ---: | ---: |")
	for _, n := range benchmarkSizes(b) {
		for _, dt := range []dtype.DType{dtype.F32, dtype.BF16} {
			benchmarkStep(b, n, dt)
		}
	}
}

func benchmarkStep(b *testing.B, n int, dt dtype.DType) {
	const fresh = 64 // gradients, each by 32 bytes further into the array than the one before
	g := onGPU(b)
	g.even = true
	rng, k := rand.New(rand.NewPCG(seed, 0)), n/100
	sample := make([]float32, n+16*fresh)
	for i := range sample {
		sample[i] = float32(rng.NormFloat64())
	}
	grad, dst := room[byte](g, len(sample)*dt.Size()), room[byte](g, n*dt.Size())
	x := put(g, sample)
	require.NoError(b, g.Store(grad, dt, x, len(sample), 1, 0))
	of, faults := g.entries(2*k), room[int32](g, 1)
	idx, val := strewn(rng, 0, n, 0.01)
	peer := kernel.Entries{Idx: put(g, idx), Val: put(g, val), N: len(idx)}
	calls, nothing := 0, func() error { return nil }
	source := func(gradient bool) kernel.Source {
		if !gradient {
			return kernel.Source{X: x, N: n, Take: true}
		}
		calls++
		return kernel.Source{X: x, N: n, Grad: grad + uintptr(16*dt.Size()*(calls%fresh)), DType: dt, Take: true}
	}
	// A copy brings the data of an exchange into the cache; its time is not counted.
	message := kernel.Entries{Idx: room[int32](g, peer.N), Val: room[float32](g, peer.N), N: peer.N}
	exchange := func() error {
		return errors.Join(g.Copy(message.Idx, peer.Idx, 4*peer.N), g.Copy(message.Val, peer.Val, 4*peer.N))
	}
	exchanges := graphTime(g, exchange)
	merge := func() error {
		return g.Merge(dst, dt, n, []kernel.Entries{of, message}, 0.5, faults, 0, kernel.Restoration{})
	}
	plain := graphTime(g, func() error { s := source(true); s.Take = false; return g.Accumulate(s) })
	for _, inPlace := range []bool{false, true} {
		state, threshold := put(g, []uint32{math.Float32bits(2.5758293), 0}), put(g, []float32{2.5758293, 0})
		for i, pick := range []func(s kernel.Source) error{
			func(s kernel.Source) error {
				return g.SelectNear(s, k, state, kernel.Acceptance{Min: k / 4, Step: 1.02}, of, 0)
			},
			func(s kernel.Source) error { return g.TopK(s, k, of, threshold) },
		} {
			name, run, end := []string{"near", "exact"}[i], func() error { return pick(source(true)) }, merge
			if inPlace {
				require.NoError(b, g.CopyIn(x, hostmem.Bytes(sample)))
				run, exchange, exchanges, name = func() error { return pick(source(false)) }, nothing, 0, name+" in place"
				end = func() error { return g.ScatterAdd(kernel.Array{Ptr: x, N: n}, of, 1) }
			}
			for range 300 {
				require.NoError(b, errors.Join(run(), exchange(), end()))
			}
			together := graphTime(g, func() error { return errors.Join(run(), exchange(), end()) }) - exchanges
			alone, second := together, graphTime(g, end)
			if !inPlace {
				alone = graphTime(g, run)
			}
			fmt.Printf("| %d | %v | %s | %.1f | %.1f | %.1f | %.1f |\n", n, dt, name, alone, second, together, plain)
		}
	}
}

// benchmarkSizes are numbers of elements, those of TUTTI_TEST_SIZES if it is set.
func benchmarkSizes(b *testing.B) []int {
	sizes := []int{1 << 20, 26_214_400, 104_857_600}
	if text := os.Getenv("TUTTI_TEST_SIZES"); text != "" {
		sizes = nil
		for s := range strings.SplitSeq(text, ",") {
			n, err := strconv.Atoi(s)
			require.NoError(b, err)
			sizes = append(sizes, n)
		}
	}
	return sizes
}

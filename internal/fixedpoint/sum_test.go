package fixedpoint

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/simd"
)

const seed = 49

// world is a sum with a random number of ranks, and what it should give.
type world struct {
	ranks     []*Sum
	terms     [][]float32 // of all ranks
	sums      [][]int32   // by rank
	exponents [][]byte
	results   [][]byte
	memory    []any // of terms, which have addresses alone
}

// newWorld draws ranks with terms of every type that is possible, in blocks of every kind.
func newWorld(r *rand.Rand, dt dtype.DType, stored bool) *world {
	w := &world{}
	n := 1 + r.IntN(20)*r.IntN(20)
	if r.IntN(50) == 0 {
		n = 3000
	}
	terms := 0
	counts := make([]int, 1+r.IntN(4))
	for i := range counts {
		counts[i] = r.IntN(4)
		terms += counts[i]
	}
	precision := 31 - bits.Len(uint(max(terms, 1))) - r.IntN(8)
	divisor := []int{1, 2, 3, 12, 64}[r.IntN(5)]
	for _, count := range counts {
		s := &Sum{N: n, Bits: precision, Divisor: divisor, DType: dt}
		for range count {
			x := drawTerm(r, n, dt)
			w.terms = append(w.terms, x)
			s.Terms = append(s.Terms, w.store(r, x, dt))
		}
		w.sums = append(w.sums, make([]int32, n))
		w.exponents = append(w.exponents, make([]byte, (n+Block-1)/Block))
		w.results = append(w.results, make([]byte, n*dt.Size()))
		last := len(w.sums) - 1
		s.Sums = hostmem.Addr(w.sums[last])
		s.Exponents = hostmem.Addr(w.exponents[last])
		if !stored {
			s.Result = hostmem.Addr(w.results[last])
			if count > 0 && s.Terms[0].DType == dt && r.IntN(2) == 0 { // in place
				s.Result = s.Terms[0].Ptr
				w.results[last] = hostmem.Slice[byte](s.Result, n*dt.Size())
			}
		}
		w.ranks = append(w.ranks, s)
	}
	return w
}

// drawTerm draws values that are exact in a type, with magnitudes that jump between blocks by up to 2^200.
func drawTerm(r *rand.Rand, n int, dt dtype.DType) []float32 {
	x := make([]float32, n)
	special := r.IntN(6) == 0
	scale := 1.0
	for i := range x {
		if i%Block == 0 {
			scale = []float64{1, math.Ldexp(1, r.IntN(200)-100), 0, 1e-41, Largest(dt) / 4}[r.IntN(5)]
		}
		x[i] = float32(r.NormFloat64() * scale)
		if special && r.IntN(90) == 0 {
			x[i] = []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))}[r.IntN(3)]
		}
	}
	if dt != dtype.F32 { // as the type has them
		short := make([]uint16, n)
		narrow(hostmem.Addr(short), dt, x)
		widen(x, hostmem.Addr(short), dt)
		runtime.KeepAlive(short)
	}
	return x
}

// store stores a term in its type, or in F32.
func (w *world) store(r *rand.Rand, x []float32, dt dtype.DType) Term {
	if dt == dtype.F32 || r.IntN(3) == 0 {
		wide := slices.Clone(x)
		w.memory = append(w.memory, wide)
		return Term{Ptr: hostmem.Addr(wide), DType: dtype.F32}
	}
	short := make([]uint16, len(x))
	w.memory = append(w.memory, short)
	narrow(hostmem.Addr(short), dt, x)
	return Term{Ptr: hostmem.Addr(short), DType: dt}
}

// field returns the largest exponent of the terms in the block that begins at an element.
func (w *world) field(block int) (field int) {
	for _, x := range w.terms {
		for _, v := range x[block:min(block+Block, w.ranks[0].N)] {
			field = max(field, int(math.Float32bits(v)>>23&0xff))
		}
	}
	return field
}

// reference returns what element i of a world's sum is, by integers of any size, with the exponent of its block.
func (w *world) reference(i, field int) (sum int64, mean float32) {
	s := w.ranks[0]
	if field == notFinite {
		return 0, float32(math.NaN())
	}
	total := new(big.Int)
	for _, x := range w.terms {
		v := new(big.Float).SetMantExp(big.NewFloat(float64(x[i])), s.Bits+126-field)
		total.Add(total, roundToEven(v))
	}
	unit := math.Ldexp(1/float64(s.Divisor), field-126-s.Bits)
	limit := Largest(s.DType)
	return total.Int64(), float32(max(-limit, min(float64(total.Int64())*unit, limit)))
}

// roundToEven returns the nearest integer, of two the even one.
func roundToEven(v *big.Float) *big.Int {
	double, _ := new(big.Float).SetMantExp(v, 1).Int(nil)
	exact := new(big.Float).SetMantExp(new(big.Float).SetInt(double), -1).Cmp(v) == 0
	whole, _ := v.Int(nil)
	if double.Bit(0) == 0 { // magnitude's fraction is below a half
		return whole
	}
	if exact && whole.Bit(0) == 0 {
		return whole
	}
	return whole.Add(whole, big.NewInt(int64(v.Sign())))
}

// Sums of all kinds of blocks are those of big integers, with and without vector instructions.
func TestReduce(t *testing.T) {
	vectors := simd.AVX2
	t.Cleanup(func() { simd.AVX2 = vectors })
	for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
		t.Run(dt.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, uint64(dt)))
			inputs := 1000
			if testing.Short() {
				inputs = 100
			}
			var worker Worker
			for input := range inputs {
				simd.AVX2 = vectors && input%3 > 0
				stored := r.IntN(2) == 0
				w := newWorld(r, dt, stored)
				n := w.ranks[0].N
				middle := r.IntN(n/Block+1) * Block
				worker.Reduce(w.ranks, middle, n, false)
				worker.Reduce(w.ranks, 0, middle, false)
				w.check(t, fmt.Sprintf("input %d of seed %d", input, seed))
			}
		})
	}
}

// check compares what all ranks have with the reference.
func (w *world) check(t *testing.T, name string) {
	s := w.ranks[0]
	field := 0
	want := make([]byte, s.DType.Size())
	for i := range s.N {
		if i%Block == 0 {
			field = w.field(i)
		}
		sum, mean := w.reference(i, field)
		if s.DType == dtype.F32 {
			hostmem.Slice[float32](hostmem.Addr(want), 1)[0] = mean
		} else {
			narrow(hostmem.Addr(want), s.DType, []float32{mean})
		}
		for rank, part := range w.ranks {
			if part.Result == 0 {
				wrong := field < notFinite && sum != int64(w.sums[rank][i])
				if wrong || byte(field)^sign != w.exponents[rank][i/Block] {
					require.Equal(t, byte(field)^sign, w.exponents[rank][i/Block], name)
					require.Equal(t, sum, int64(w.sums[rank][i]), "%s, element %d", name, i)
				}
				continue
			}
			got := w.results[rank][i*len(want):][:len(want)]
			same := bytes.Equal(want, got)
			if field == notFinite {
				same = isNaN(got, s.DType)
			}
			if !same {
				require.Failf(t, "wrong mean", "%s, element %d, rank %d: got %x, want %x", name, i, rank, got, want)
			}
		}
	}
}

func isNaN(element []byte, dt dtype.DType) bool {
	x := make([]float32, 1)
	if dt == dtype.F32 {
		x = hostmem.Slice[float32](hostmem.Addr(element), 1)
	} else {
		widen(x, hostmem.Addr(element), dt)
	}
	return math.IsNaN(float64(x[0]))
}

package hostops_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/internal/reductions"
)

const reduceSeed = 7

var (
	reduceSources = []int{1, 2, 3, 5, 8}
	reduceDsts    = []int{1, 2, 4}
	reduceCounts  = []int{0, 1, 2, 7, 63, 64, 65, 1000, 4097}
)

// elements is a buffer of one type that the reference reads and writes by element.
type elements struct {
	dt    dtype.DType
	bytes []byte
}

func newElements(dt dtype.DType, n int) elements {
	return elements{dt, make([]byte, n*dt.Size())}
}

func (e elements) len() int { return len(e.bytes) / e.dt.Size() }

func (e elements) addr() uintptr { return hostmem.Addr(e.bytes) }

func (e elements) bits(i int) uint64 {
	var wide [8]byte
	copy(wide[:], e.bytes[i*e.dt.Size():(i+1)*e.dt.Size()])
	return binary.LittleEndian.Uint64(wide[:])
}

func (e elements) setBits(i int, bits uint64) {
	var wide [8]byte
	binary.LittleEndian.PutUint64(wide[:], bits)
	copy(e.bytes[i*e.dt.Size():(i+1)*e.dt.Size()], wide[:])
}

// fill sets random elements: any bits for integers and, now and then, for
// floats, which are mostly of moderate size.
func (e elements) fill(t *testing.T, r *rand.Rand) {
	for i := range e.len() {
		e.setBits(i, r.Uint64())
		if e.dt.IsFloat() && r.IntN(16) > 0 {
			e.setBits(i, narrow(t, e.dt, math.Round(64*r.NormFloat64())/32))
		}
	}
}

// wantReduced returns the bits of the reduction of one element of each source.
func wantReduced(t *testing.T, dt dtype.DType, op reductions.Op, sources []uint64) uint64 {
	switch {
	case dt == dtype.Bool:
		return wantBool(op, sources)
	case len(sources) == 1:
		return sources[0]
	case dt.IsFloat():
		return wantFloat(t, dt, op, sources)
	}
	return wantInteger(dt, op, sources)
}

func wantBool(op reductions.Op, sources []uint64) uint64 {
	trues := uint64(0)
	for _, b := range sources {
		trues += min(b, 1)
	}
	if op == reductions.Prod || op == reductions.Min {
		return trues / uint64(len(sources))
	}
	return min(trues, 1)
}

// wantInteger computes without limit and keeps the lower bits.
func wantInteger(dt dtype.DType, op reductions.Op, sources []uint64) uint64 {
	modulus := new(big.Int).Lsh(big.NewInt(1), uint(8*dt.Size()))
	values := make([]*big.Int, len(sources))
	for i, bits := range sources {
		values[i] = new(big.Int).SetUint64(bits)
		if dt.IsSigned() && values[i].Bit(8*dt.Size()-1) == 1 {
			values[i].Sub(values[i], modulus)
		}
	}
	result := new(big.Int).Set(values[0])
	for _, v := range values[1:] {
		switch op {
		case reductions.Sum:
			result.Add(result, v)
		case reductions.Prod:
			result.Mul(result, v)
		}
	}
	switch op {
	case reductions.Min:
		result = slices.MinFunc(values, (*big.Int).Cmp)
	case reductions.Max:
		result = slices.MaxFunc(values, (*big.Int).Cmp)
	}
	return new(big.Int).Mod(result, modulus).Uint64()
}

// wantFloat accumulates in float64. For types narrower than that it rounds to
// float32 after each step, which is what float32 arithmetic gives.
func wantFloat(t *testing.T, dt dtype.DType, op reductions.Op, sources []uint64) uint64 {
	acc, anyNaN := 0.0, false
	for i, bits := range sources {
		v, err := dtype.ToFloat64(dt, bits)
		if err != nil {
			t.Fatal(err)
		}
		anyNaN = anyNaN || math.IsNaN(v)
		switch {
		case i == 0:
			acc = v
		case op == reductions.Prod:
			acc *= v
		case op == reductions.Min:
			acc = math.Min(acc, v)
		case op == reductions.Max:
			acc = math.Max(acc, v)
		default:
			acc += v
		}
		if op == reductions.Avg && i == len(sources)-1 {
			acc = roundLike(dt, acc) / float64(len(sources))
		}
		acc = roundLike(dt, acc)
	}
	if anyNaN {
		acc = math.Float64frombits(0x7ff8 << 48)
	}
	return narrow(t, dt, acc)
}

// narrow rounds v to an element.
func narrow(t *testing.T, dt dtype.DType, v float64) uint64 {
	bits, err := dtype.FromFloat64(dt, v)
	if err != nil { // not require: this is called for every element
		t.Fatal(err)
	}
	return bits
}

func roundLike(dt dtype.DType, v float64) float64 {
	if dt == dtype.F64 {
		return v
	}
	return float64(float32(v))
}

// sameElement compares bits; of NaNs only the results of Min and Max are fixed.
func sameElement(dt dtype.DType, op reductions.Op, want, got uint64) bool {
	if want == got || !dt.IsFloat() || op == reductions.Min || op == reductions.Max {
		return want == got
	}
	w, _ := dtype.ToFloat64(dt, want)
	g, _ := dtype.ToFloat64(dt, got)
	return math.IsNaN(w) && math.IsNaN(g)
}

// eachReduction runs a test for every dtype and op that is defined on it.
func eachReduction(t *testing.T, test func(t *testing.T, dt dtype.DType, op reductions.Op)) {
	for _, dt := range dtype.All() {
		for _, op := range reductions.All() {
			if op.Defined(dt) {
				t.Run(fmt.Sprintf("%v/%v", dt, op), func(t *testing.T) { test(t, dt, op) })
			}
		}
	}
}

func TestReduce(t *testing.T) {
	counts := reduceCounts
	if race.Enabled { // one goroutine: the detector sees nothing new, slowly
		counts = counts[:len(counts)-2]
	}
	eachReduction(t, func(t *testing.T, dt dtype.DType, op reductions.Op) {
		r := rand.New(rand.NewPCG(reduceSeed, uint64(dt)))
		for _, srcs := range reduceSources {
			for _, count := range counts {
				if count > 1000 && srcs != 2 {
					continue // the blocks of long buffers do not know how many sources there are
				}
				sources := make([]elements, srcs)
				for i := range sources {
					sources[i] = newElements(dt, count)
					sources[i].fill(t, r)
				}
				want := newElements(dt, count)
				for i := range count {
					column := make([]uint64, srcs)
					for s, source := range sources {
						column[s] = source.bits(i)
					}
					want.setBits(i, wantReduced(t, dt, op, column))
				}
				for _, dsts := range reduceDsts {
					for _, inPlace := range []bool{false, true} {
						checkReduce(t, op, sources, want, dsts, inPlace)
					}
				}
			}
		}
	})
}

func addresses(buffers []elements) []uintptr {
	all := make([]uintptr, len(buffers))
	for i, b := range buffers {
		all[i] = b.addr()
	}
	return all
}

// checkReduce reduces copies of the sources into dsts buffers, of which the
// first ones are the last sources if inPlace.
func checkReduce(t *testing.T, op reductions.Op, sources []elements, want elements, dsts int, inPlace bool) {
	t.Helper()
	dt, count := want.dt, want.len()
	src := make([]elements, len(sources))
	for i, source := range sources {
		src[i] = elements{dt, slices.Clone(source.bytes)}
	}
	dst := make([]elements, dsts)
	for i := range dst {
		if inPlace && i < len(src) {
			dst[i] = src[len(src)-1-i]
		} else {
			dst[i] = newElements(dt, count)
		}
	}
	hostops.Reduce(addresses(dst), addresses(src), count, dt, op, inPlace)
	runtime.KeepAlive(src)
	for d := range dst {
		if bytes.Equal(dst[d].bytes, want.bytes) {
			continue
		}
		for i := range count {
			if got := dst[d].bits(i); !sameElement(dt, op, want.bits(i), got) {
				require.Failf(t, "wrong element", "seed %d: %v %v of %d sources, destination %d of %d, in place %v: element %d of %d is %#x, want %#x",
					reduceSeed, dt, op, len(sources), d, dsts, inPlace, i, count, got, want.bits(i))
			}
		}
	}
}

func TestReduceDoesNotAllocate(t *testing.T) {
	const count = 300
	eachReduction(t, func(t *testing.T, dt dtype.DType, op reductions.Op) {
		buffers := [3]elements{newElements(dt, count), newElements(dt, count), newElements(dt, count)}
		a, b, c := buffers[0].addr(), buffers[1].addr(), buffers[2].addr()
		require.Zero(t, testing.AllocsPerRun(20, func() {
			hostops.Reduce([]uintptr{a, b}, []uintptr{a, b, c}, count, dt, op, true)
		}))
		runtime.KeepAlive(buffers)
	})
}

func TestCopyBytes(t *testing.T) {
	r := rand.New(rand.NewPCG(reduceSeed, 0))
	for _, n := range []int{0, 1, 63, 64, 65, 4097, 1 << 20} {
		for _, streaming := range []bool{false, true} {
			src, dst := newElements(dtype.U8, n), newElements(dtype.U8, n)
			src.fill(t, r)
			hostops.Copy(dst.addr(), src.addr(), n, streaming)
			runtime.KeepAlive(src)
			require.Equal(t, src.bytes, dst.bytes, "seed %d: %d bytes, streaming %v", reduceSeed, n, streaming)
		}
	}
}

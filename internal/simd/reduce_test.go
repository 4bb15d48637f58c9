package simd

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/hostmem"
)

const seed = 20240613

func newRand() *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

func defined(k Kind, op Op) bool { return op != OpAvg || isFloat(k) }

// eachCase runs a test for every kind and op, over all paths.
func eachCase(t *testing.T, test func(t *testing.T, k Kind, op Op)) {
	eachPath(t, func(t *testing.T) {
		for k := range numKinds {
			for op := range numOps {
				if defined(k, op) {
					t.Run(kindNames[k]+"/"+opNames[op], func(t *testing.T) { test(t, k, op) })
				}
			}
		}
	})
}

// special holds bit patterns that arithmetic treats apart.
func special(k Kind) []uint64 {
	top := uint64(1) << (8*k.Size() - 1)
	patterns := []uint64{0, 1, top, top - 1, top | 1, 2*top - 1}
	if !isFloat(k) {
		return patterns
	}
	nan := refQuietNaN(k)
	infinity := nan &^ (nan & -nan)
	return append(patterns, nan, nan|top, nan|5, infinity|1, infinity, infinity|top, infinity-1,
		refEncode(k, 1), refEncode(k, -1), refEncode(k, 1.5))
}

// element returns random bits of one element. Half of the floats are of
// moderate size, so that results do not all overflow.
func element(r *rand.Rand, k Kind) uint64 {
	switch choice := r.IntN(8); {
	case choice == 0:
		return special(k)[r.IntN(len(special(k)))]
	case choice < 6 && isFloat(k):
		return refEncode(k, math.Round(r.NormFloat64()*4096)/1024)
	}
	return r.Uint64() >> (64 - 8*k.Size())
}

// guarded is a buffer of elements between bytes that must not be written.
type guarded struct {
	memory []byte
	bytes  []byte // the elements
	start  int
}

const guardByte, guardLen = 0xa5, 64

// newGuarded makes room for bytes that start shift bytes past a multiple of 64.
func newGuarded(bytes, shift int) guarded {
	memory := make([]byte, 2*guardLen+64+bytes)
	for i := range memory {
		memory[i] = guardByte
	}
	start := guardLen + int(-hostmem.Addr(memory[guardLen:])%64) + shift
	return guarded{memory: memory, bytes: memory[start : start+bytes : start+bytes], start: start}
}

func (g guarded) addr() uintptr { return hostmem.Addr(g.memory) + uintptr(g.start) }

func (g guarded) requireIntact(t *testing.T, msg ...any) {
	t.Helper()
	outside := append(slices.Clone(g.memory[:g.start]), g.memory[g.start+len(g.bytes):]...)
	for _, b := range outside {
		if b != guardByte {
			require.Fail(t, "wrote outside of the buffer", msg...)
		}
	}
}

func getElement(k Kind, bytes []byte, i int) uint64 {
	var wide [8]byte
	copy(wide[:], bytes[i*k.Size():(i+1)*k.Size()])
	return binary.LittleEndian.Uint64(wide[:])
}

func putElement(k Kind, bytes []byte, i int, bits uint64) {
	var wide [8]byte
	binary.LittleEndian.PutUint64(wide[:], bits)
	copy(bytes[i*k.Size():(i+1)*k.Size()], wide[:])
}

// reduction is one call of Reduce on random sources.
type reduction struct {
	k          Kind
	op         Op
	n          int
	dsts, srcs []guarded
	columns    [][]uint64 // the bits of element i of all sources
}

// newReduction makes buffers whose starts are shift bytes off alignment; the
// destinations from the second on are inPlace sources, if asked for.
func newReduction(r *rand.Rand, k Kind, op Op, n, srcs, dsts, shift int, inPlace bool) reduction {
	c := reduction{k: k, op: op, n: n, columns: make([][]uint64, n)}
	for range srcs {
		src := newGuarded(n*k.Size(), shift)
		for i := range n {
			bits := element(r, k)
			putElement(k, src.bytes, i, bits)
			c.columns[i] = append(c.columns[i], bits)
		}
		c.srcs = append(c.srcs, src)
	}
	for i := range dsts {
		if inPlace && i < srcs {
			c.dsts = append(c.dsts, c.srcs[srcs-1-i])
		} else {
			c.dsts = append(c.dsts, newGuarded(n*k.Size(), shift))
		}
	}
	return c
}

func addrs(buffers []guarded) []uintptr {
	all := make([]uintptr, len(buffers))
	for i, b := range buffers {
		all[i] = b.addr()
	}
	return all
}

// requireRight runs the reduction and compares all destinations.
func (c reduction) requireRight(t *testing.T, stream bool) {
	t.Helper()
	Reduce(c.k, c.op, addrs(c.dsts), addrs(c.srcs), c.n, stream)
	for d, dst := range c.dsts {
		where := fmt.Sprintf("seed %d: n=%d, %d sources, destination %d of %d, stream=%v",
			seed, c.n, len(c.srcs), d, len(c.dsts), stream)
		dst.requireIntact(t, where)
		for i, column := range c.columns {
			want, got := refReduce(c.k, c.op, column), getElement(c.k, dst.bytes, i)
			if got != want && !c.sameNaN(want, got) {
				require.Failf(t, "wrong element", "%s: element %d of %#x: got %#x, want %#x", where, i, column, got, want)
			}
		}
	}
}

// sameNaN reports whether both are NaNs, where the package leaves open which.
func (c reduction) sameNaN(want, got uint64) bool {
	fixed := c.op == OpMin || c.op == OpMax || len(c.srcs) == 1
	return isFloat(c.k) && !fixed && isNaNBits(c.k, want) && isNaNBits(c.k, got)
}

func TestReduceOfEveryLength(t *testing.T) {
	eachCase(t, func(t *testing.T, k Kind, op Op) {
		r := newRand()
		for n := range 131 {
			shift := r.IntN(64/k.Size()) * k.Size()
			newReduction(r, k, op, n, 2, 1, shift, false).requireRight(t, n%2 == 0)
		}
	})
}

func TestReduceOfManyBuffers(t *testing.T) {
	eachCase(t, func(t *testing.T, k Kind, op Op) {
		r := newRand()
		for _, srcs := range []int{1, 2, 3, 5, 9} {
			for _, dsts := range []int{1, 2, 4} {
				for _, inPlace := range []bool{false, true} {
					newReduction(r, k, op, 300, srcs, dsts, k.Size(), inPlace).requireRight(t, inPlace)
				}
			}
		}
	})
}

// A buffer that one call of a kernel does not handle.
func TestReduceOfLargeBuffers(t *testing.T) {
	const bytes = 600<<10 + 24
	eachPath(t, func(t *testing.T) {
		for _, k := range []Kind{F64, F16, U8} {
			for _, stream := range []bool{false, true} {
				newReduction(newRand(), k, OpAdd, bytes/k.Size(), 2, 2, 8, true).requireRight(t, stream)
			}
		}
	})
}

// Elements that are not aligned to their size, and destinations that are
// aligned differently, where streaming is not possible.
func TestReduceOfUnalignedBuffers(t *testing.T) {
	eachPath(t, func(t *testing.T) {
		c := newReduction(newRand(), F32, OpAdd, 1000, 2, 2, 1, false)
		c.dsts[1] = newGuarded(4000, 6)
		c.requireRight(t, true)
	})
}

// All pairs of special values, in both orders.
func TestReduceOfSpecialValues(t *testing.T) {
	eachCase(t, func(t *testing.T, k Kind, op Op) {
		values := special(k)
		c := newReduction(newRand(), k, op, len(values)*len(values), 2, 1, 0, false)
		for i := range c.columns {
			c.columns[i] = []uint64{values[i/len(values)], values[i%len(values)]}
			putElement(k, c.srcs[0].bytes, i, c.columns[i][0])
			putElement(k, c.srcs[1].bytes, i, c.columns[i][1])
		}
		c.requireRight(t, false)
	})
}

// All pairs of FP8 values: every rounding, tie, overflow and subnormal result.
func TestReduceOfAllFP8Pairs(t *testing.T) {
	eachPath(t, func(t *testing.T) {
		for _, k := range []Kind{FP8E4M3, FP8E5M2} {
			for op := range numOps {
				c := newReduction(newRand(), k, op, 1<<16, 2, 1, 0, false)
				for i := range c.columns {
					c.columns[i] = []uint64{uint64(i >> 8), uint64(i & 0xff)}
					c.srcs[0].bytes[i], c.srcs[1].bytes[i] = byte(i>>8), byte(i)
				}
				c.requireRight(t, false)
			}
		}
	})
}

func TestReduceOfNothing(t *testing.T) {
	eachPath(t, func(t *testing.T) {
		Reduce(F32, OpAdd, []uintptr{0}, []uintptr{0, 0}, 0, true)
		Reduce(F32, OpAdd, nil, []uintptr{0, 0}, 5, true)
	})
}

func TestReduceDoesNotAllocate(t *testing.T) {
	eachCase(t, func(t *testing.T, k Kind, op Op) {
		a, b := newGuarded(1000, 0), newGuarded(1000, 0)
		p, q := a.addr(), b.addr()
		require.Zero(t, testing.AllocsPerRun(10, func() {
			Reduce(k, op, []uintptr{p}, []uintptr{p, q}, 1000/k.Size(), false)
		}))
	})
}

func TestCopy(t *testing.T) {
	eachPath(t, func(t *testing.T) {
		r := newRand()
		for _, n := range []int{0, 1, 31, 63, 64, 129, 5000, 300 << 10} {
			for _, stream := range []bool{false, true} {
				src, dst := newGuarded(n, r.IntN(64)), newGuarded(n, r.IntN(64))
				for i := range src.bytes {
					src.bytes[i] = byte(r.Uint32())
				}
				Copy(dst.addr(), src.addr(), n, stream)
				require.Equal(t, src.bytes, dst.bytes, "seed %d: n=%d, stream=%v", seed, n, stream)
				dst.requireIntact(t)
			}
		}
	})
}

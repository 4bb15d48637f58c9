package hostops

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/simd/simdtest"
)

// eachCase runs a test for every type and op, over all paths.
func eachCase(t *testing.T, test func(t *testing.T, k dtype.DType, op reductions.Op)) {
	simdtest.EachPath(t, func(t *testing.T) {
		for _, k := range dtype.All() {
			for _, op := range reductions.All() {
				if op.Defined(k) {
					t.Run(k.String()+"/"+op.String(), func(t *testing.T) { test(t, k, op) })
				}
			}
		}
	})
}

func getElement(k dtype.DType, bytes []byte, i int) uint64 {
	var wide [8]byte
	copy(wide[:], bytes[i*k.Size():(i+1)*k.Size()])
	return binary.LittleEndian.Uint64(wide[:])
}

func putElement(k dtype.DType, bytes []byte, i int, bits uint64) {
	var wide [8]byte
	binary.LittleEndian.PutUint64(wide[:], bits)
	copy(bytes[i*k.Size():(i+1)*k.Size()], wide[:])
}

// reduction is one call of Reduce on random sources.
type reduction struct {
	k          dtype.DType
	op         reductions.Op
	n          int
	shift      int
	dsts, srcs []simdtest.Guarded
	columns    [][]uint64 // the bits of element i of all sources
	wants      []uint64   // the result of each element; nil: not computed yet
}

// newReduction makes buffers whose starts are shift bytes off alignment; the
// destinations from the second on are inPlace sources, if asked for.
func newReduction(r *rand.Rand, k dtype.DType, op reductions.Op, n, srcs, dsts, shift int, inPlace bool) reduction {
	c := reduction{k: k, op: op, n: n, shift: shift, columns: make([][]uint64, n)}
	bits := make([]uint64, n*srcs)
	for i := range c.columns {
		c.columns[i] = bits[i*srcs:][:srcs]
	}
	for s := range srcs {
		src := simdtest.NewGuarded(n*k.Size(), shift)
		for i := range n {
			bits := simdtest.Element(r, k)
			putElement(k, src.Bytes, i, bits)
			c.columns[i][s] = bits
		}
		c.srcs = append(c.srcs, src)
	}
	c.addDestinations(dsts, inPlace)
	return c
}

func (c *reduction) addDestinations(dsts int, inPlace bool) {
	for i := range dsts {
		if inPlace && i < len(c.srcs) {
			c.dsts = append(c.dsts, c.srcs[len(c.srcs)-1-i])
		} else {
			c.dsts = append(c.dsts, simdtest.NewGuarded(c.n*c.k.Size(), c.shift))
		}
	}
}

// expect computes the results, which copies have from then on.
func (c *reduction) expect() {
	c.wants = make([]uint64, c.n)
	for i, column := range c.columns {
		c.wants[i] = refReduce(c.k, c.op, column)
	}
}

// copied returns the same reduction with buffers of its own, and other destinations.
func (c reduction) copied(dsts int, inPlace bool) reduction {
	srcs := c.srcs
	c.srcs = nil
	c.dsts = nil
	for _, s := range srcs {
		src := simdtest.NewGuarded(len(s.Bytes), c.shift)
		copy(src.Bytes, s.Bytes)
		c.srcs = append(c.srcs, src)
	}
	c.addDestinations(dsts, inPlace)
	return c
}

func addrs(buffers []simdtest.Guarded) []uintptr {
	all := make([]uintptr, len(buffers))
	for i, b := range buffers {
		all[i] = b.Addr()
	}
	return all
}

// requireRight runs the reduction and compares all destinations.
func (c reduction) requireRight(t *testing.T, stream bool) {
	t.Helper()
	Reduce(addrs(c.dsts), addrs(c.srcs), c.n, c.k, c.op, stream)
	if c.wants == nil {
		c.expect()
	}
	for d, dst := range c.dsts {
		where := fmt.Sprintf("seed %d: n=%d, %d sources, destination %d of %d, stream=%v",
			simdtest.Seed, c.n, len(c.srcs), d, len(c.dsts), stream)
		dst.RequireIntact(t, where)
		for i, column := range c.columns {
			want, got := c.wants[i], getElement(c.k, dst.Bytes, i)
			if got != want && !c.sameNaN(want, got) {
				require.Failf(t, "wrong element", "%s: element %d of %#x: got %#x, want %#x", where, i, column, got, want)
			}
		}
	}
}

// sameNaN reports whether both are NaNs, where the package leaves open which.
func (c reduction) sameNaN(want, got uint64) bool {
	fixed := c.op == reductions.Min || c.op == reductions.Max || len(c.srcs) == 1
	return c.k.IsFloat() && !fixed && simdtest.IsNaN(c.k, want) && simdtest.IsNaN(c.k, got)
}

func TestReduceOfEveryLength(t *testing.T) {
	eachCase(t, func(t *testing.T, k dtype.DType, op reductions.Op) {
		r := simdtest.NewRand()
		for n := range 131 {
			shift := r.IntN(64/k.Size()) * k.Size()
			newReduction(r, k, op, n, 2, 1, shift, false).requireRight(t, n%2 == 0)
		}
	})
}

func TestReduceOfManyBuffers(t *testing.T) {
	eachCase(t, func(t *testing.T, k dtype.DType, op reductions.Op) {
		r := simdtest.NewRand()
		for _, srcs := range []int{1, 2, 3, 5, 9} {
			c := newReduction(r, k, op, 300, srcs, 0, k.Size(), false)
			c.expect()
			for _, dsts := range []int{1, 2, 4} {
				for _, inPlace := range []bool{false, true} {
					c.copied(dsts, inPlace).requireRight(t, inPlace)
				}
			}
		}
	})
}

// A buffer that one call of a kernel does not handle.
func TestReduceOfLargeBuffers(t *testing.T) {
	const bytes = 600<<10 + 24
	for _, k := range []dtype.DType{dtype.F64, dtype.F16, dtype.U8} {
		c := newReduction(simdtest.NewRand(), k, reductions.Sum, bytes/k.Size(), 2, 0, 8, false)
		c.expect()
		simdtest.EachPath(t, func(t *testing.T) {
			for _, stream := range []bool{false, true} {
				c.copied(2, true).requireRight(t, stream)
			}
		})
	}
}

// Elements that are not aligned to their size, and destinations that are
// aligned differently, where streaming is not possible.
func TestReduceOfUnalignedBuffers(t *testing.T) {
	simdtest.EachPath(t, func(t *testing.T) {
		c := newReduction(simdtest.NewRand(), dtype.F32, reductions.Sum, 1000, 2, 2, 1, false)
		c.dsts[1] = simdtest.NewGuarded(4000, 6)
		c.requireRight(t, true)
	})
}

// All pairs of special values, in both orders.
func TestReduceOfSpecialValues(t *testing.T) {
	eachCase(t, func(t *testing.T, k dtype.DType, op reductions.Op) {
		values := simdtest.Special(k)
		c := newReduction(simdtest.NewRand(), k, op, len(values)*len(values), 2, 1, 0, false)
		for i := range c.columns {
			c.columns[i] = []uint64{values[i/len(values)], values[i%len(values)]}
			putElement(k, c.srcs[0].Bytes, i, c.columns[i][0])
			putElement(k, c.srcs[1].Bytes, i, c.columns[i][1])
		}
		c.requireRight(t, false)
	})
}

// All pairs of FP8 values: every rounding, tie, overflow and subnormal result.
func TestReduceOfAllFP8Pairs(t *testing.T) {
	for _, k := range []dtype.DType{dtype.FP8E4M3, dtype.FP8E5M2} {
		for _, op := range reductions.All() {
			c := newReduction(simdtest.NewRand(), k, op, 1<<16, 2, 0, 0, false)
			for i := range c.columns {
				c.columns[i][0], c.columns[i][1] = uint64(i>>8), uint64(i&0xff)
				c.srcs[0].Bytes[i], c.srcs[1].Bytes[i] = byte(i>>8), byte(i)
			}
			c.expect()
			simdtest.EachPath(t, func(t *testing.T) { c.copied(1, false).requireRight(t, false) })
		}
	}
}

func TestReduceOfNothing(t *testing.T) {
	simdtest.EachPath(t, func(t *testing.T) {
		Reduce([]uintptr{0}, []uintptr{0, 0}, 0, dtype.F32, reductions.Sum, true)
		Reduce(nil, []uintptr{0, 0}, 5, dtype.F32, reductions.Sum, true)
	})
}

func TestReduceDoesNotAllocate(t *testing.T) {
	eachCase(t, func(t *testing.T, k dtype.DType, op reductions.Op) {
		a, b := simdtest.NewGuarded(1000, 0), simdtest.NewGuarded(1000, 0)
		p, q := a.Addr(), b.Addr()
		require.Zero(t, testing.AllocsPerRun(10, func() {
			Reduce([]uintptr{p}, []uintptr{p, q}, 1000/k.Size(), k, op, false)
		}))
	})
}

func TestCopy(t *testing.T) {
	simdtest.EachPath(t, func(t *testing.T) {
		r := simdtest.NewRand()
		for _, n := range []int{0, 1, 31, 63, 64, 129, 5000, 300 << 10} {
			for _, stream := range []bool{false, true} {
				src, dst := simdtest.NewGuarded(n, r.IntN(64)), simdtest.NewGuarded(n, r.IntN(64))
				for i := range src.Bytes {
					src.Bytes[i] = byte(r.Uint32())
				}
				Copy(dst.Addr(), src.Addr(), n, stream)
				require.Equal(t, src.Bytes, dst.Bytes, "seed %d: n=%d, stream=%v", simdtest.Seed, n, stream)
				dst.RequireIntact(t)
			}
		}
	})
}

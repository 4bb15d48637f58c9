package gaps

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/simd/simdtest"
)

// TestBlocks codes gaps of all sizes, in blocks of any length, and decodes them and their beginnings, with and without
// bytes behind them, by the portable code and the assembly.
func TestBlocks(t *testing.T) {
	simdtest.EachPath(t, func(t *testing.T) {
		r := simdtest.NewRand()
		for bits := range 31 {
			for _, count := range []int{1, 2, 7, 8, 9, 63, 100, 1000, 1001, Block} {
				for _, wide := range []bool{false, true} {
					testBlock(t, r, bits, count, wide)
				}
			}
		}
	})
}

func testBlock(t *testing.T, r *rand.Rand, bits, count int, wide bool) {
	before := int32(r.IntN(100)) - 1
	var idx []int32
	for at := int64(before); len(idx) < count; {
		gap := int64(float64(int64(1)<<bits) * r.ExpFloat64())
		if wide && r.IntN(10) == 0 {
			gap *= int64(1 + r.IntN(200))
		}
		at = min(at+1+gap, math.MaxInt32-int64(count-len(idx))+1)
		idx = append(idx, int32(at))
	}
	var g Gaps
	g.Set(idx, before)
	h := g.Choose()
	code := make([]byte, h.Bytes(count), h.Bytes(count)+8)
	g.Encode(code, h)
	for _, behind := range []int{0, 8, 31, 100} {
		for _, first := range []int{count, r.IntN(count + 1)} {
			src := slices.Clone(code)
			for range behind {
				src = append(src, byte(r.Uint32()))
			}
			got := make([]int32, first+1)
			got[first] = -7
			Decode(got[:first:first], count, src, h, before+1)
			require.Equal(t, append(idx[:first:first], -7), got, "%d of %d gaps of %d bits, header %#x, seed %d", first, count, bits, h, simdtest.Seed)
		}
	}
}

// TestAscends decodes what no Encode wrote with the headers that promise ascending indices.
func TestAscends(t *testing.T) {
	simdtest.EachPath(t, func(t *testing.T) {
		r := simdtest.NewRand()
		for h := range Header(math.MaxUint16) {
			k, _, u := h.split()
			if _, tried := slices.BinarySearch([]int{0, 1, 8, 100, maxQuotient}, u); !h.Ascends() || !tried {
				continue
			}
			for _, fill := range []func() byte{func() byte { return 0 }, func() byte { return 255 }, func() byte { return byte(r.Uint32()) }, func() byte { return byte(r.Uint32()) & 1 }} {
				src := make([]byte, h.Bytes(Block))
				for i := range src {
					src[i] = fill()
				}
				idx, before := make([]int32, Block), int32(1<<30-1)
				Decode(idx, Block, src, h, before+1)
				for _, at := range idx {
					if at <= before {
						t.Fatalf("%d after %d: %d low bits, %d bytes of quotients, seed %d", at, before, k, u, simdtest.Seed)
					}
					before = at
				}
			}
		}
	})
}

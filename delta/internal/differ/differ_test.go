package differ

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/simd/simdtest"
)

// TestList compares elements that differ in any bit with a list made one by one.
func TestList(t *testing.T) {
	simdtest.EachPath(t, func(t *testing.T) {
		rng := simdtest.NewRand()
		for n := range 100 {
			for _, share := range []float64{0, 0.02, 0.5, 1} {
				for _, size := range []int{1, 2, 4, 8} {
					old := make([]uint64, n)
					for i := range old {
						old[i] = rng.Uint64()
					}
					now := slices.Clone(old)
					want := []uint16{}
					for i := range 8 * n / size {
						if rng.Float64() < share {
							now[i*size/8] ^= 1 << (i*size%8*8 + rng.IntN(8*size))
							want = append(want, uint16(i))
						}
					}
					list := make([]uint16, 8*n/size+Room+1)
					list[8*n/size+Room] = 7
					found := List(list, old, now, size)
					require.Equal(t, want, list[:found], "%d words, elements of %d bytes, seed %d", n, size, simdtest.Seed)
					require.EqualValues(t, 7, list[8*n/size+Room], "behind the list, seed %d", simdtest.Seed)
				}
			}
		}
	})
}

package f32

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// BenchmarkSelectRange selects shares of uniform values, from the second-level
// cache and from memory.
func BenchmarkSelectRange(b *testing.B) {
	const seed = 6
	for _, n := range []int{1 << 16, 26_214_400} {
		rng := rand.New(rand.NewPCG(seed, 0))
		x := make([]float32, n)
		for i := range x {
			x[i] = 1 - rng.Float32()
		}
		idx, val := make([]int32, n), make([]float32, n)
		for _, share := range []float32{0, 0.001, 0.01, 0.1, 0.5} {
			b.Run(fmt.Sprintf("n=%d/share=%v", n, share), func(b *testing.B) {
				b.SetBytes(4 * int64(n))
				room := min(n, int(1.1*share*float32(n))+1000)
				lo := Key(math.Nextafter32(1-share, 2))
				for b.Loop() {
					SelectRange(x, 0, lo, MaxKey, idx[:room], val[:room])
				}
			})
		}
	}
}

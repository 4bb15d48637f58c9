package fixedpoint

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/simd"
)

// drawSums draws sums below exponents that jump between blocks, of which some are zeros or canceled out.
func drawSums(r *rand.Rand, n, skip int) (sums []int32, exponents []byte) {
	sums = make([]int32, n)
	exponents = make([]byte, (skip+n+Block-1)/Block)
	common := r.IntN(notFinite)
	special := r.IntN(8) == 0
	for b := range exponents {
		field := common
		switch {
		case r.IntN(3) == 0:
			field = r.IntN(notFinite)
		case special && r.IntN(9) == 0:
			field = notFinite
		}
		exponents[b] = byte(field) ^ sign
		length := r.IntN(33)
		for i := max(b*Block-skip, 0); i < min((b+1)*Block-skip, n); i++ {
			sums[i] = int32(int64(r.Uint64()) >> (64 - max(length, 1)))
			if length == 0 || r.IntN(5) == 0 {
				sums[i] = 0
			}
			if r.IntN(300) == 0 {
				sums[i] = []int32{math.MaxInt32, math.MinInt32}[r.IntN(2)]
			}
		}
	}
	return sums, exponents
}

// bigSquare is the sum of the squares, rounded once.
func bigSquare(sums []int32, exponents []byte, skip, precision, divisor int) float64 {
	total := new(big.Float).SetPrec(2000)
	for i, s := range sums {
		field := exponent(exponents[(skip+i)/Block]).field()
		if field == notFinite {
			return math.NaN()
		}
		v := new(big.Float).SetPrec(2000).SetInt64(int64(s) * int64(s))
		total.Add(total, v.SetMantExp(v, 2*(field-bias-precision)))
	}
	total.Quo(total, new(big.Float).SetInt64(int64(divisor)*int64(divisor)))
	v, _ := total.Float64()
	return v
}

// Squares have the same bits with and without vector instructions, and are those of big integers up to roundings.
func TestSquare(t *testing.T) {
	vectors := simd.AVX2
	t.Cleanup(func() { simd.AVX2 = vectors })
	r := rand.New(rand.NewPCG(seed, 2))
	for input := range 2000 {
		skip := 0
		if input%2 == 0 {
			skip = r.IntN(Block)
		}
		n := r.IntN(20) * r.IntN(40)
		if input%200 == 0 {
			n = 70_000 // more than one call of a kernel handles
		}
		sums, exponents := drawSums(r, n, skip)
		precision := 8 + r.IntN(23)
		divisor := 1 + r.IntN(12)
		simd.AVX2 = false
		portable := Square(sums, exponents, skip, precision, divisor)
		simd.AVX2 = vectors
		got := Square(sums, exponents, skip, precision, divisor)
		require.Equal(t, math.Float64bits(portable), math.Float64bits(got), "input %d of seed %d", input, seed)
		want := bigSquare(sums, exponents, skip, precision, divisor)
		if math.IsNaN(want) {
			assert.True(t, math.IsNaN(got), "input %d of seed %d", input, seed)
			continue
		}
		// The largest square has its highest bit 54 to 56 bits above the unit to which each one is cut.
		bound := math.Ldexp(want, -54)*float64(n) + 4*math.Ldexp(want, -52)
		require.InDelta(t, want, got, bound, "input %d of seed %d", input, seed)
	}
}

// BenchmarkSquare reads sums of 16 MiB.
func BenchmarkSquare(b *testing.B) {
	sums, exponents := drawSums(rand.New(rand.NewPCG(seed, 3)), 4<<20, 0)
	for i := range exponents {
		exponents[i] = 100
	}
	b.SetBytes(16 << 20)
	for b.Loop() {
		Square(sums, exponents, 0, 24, 12)
	}
}

package fixedpoint

//go:generate env GOWORK=off go run -C ../simd/gen ./fixed -out ../../fixedpoint/avx2_amd64.s -stubs ../../fixedpoint/avx2_amd64.go -pkg fixedpoint

import (
	"math"

	"github.com/tutti-go/tutti/internal/simd"
)

// The vectorized functions return how many leading values they handled: whole blocks, none without AVX2. A call
// handles at most simd.Chunk bytes.

const step = simd.Chunk / 4

// raiseBlocks raises the exponents of whole blocks.
func raiseBlocks(exponents []byte, x []float32) int {
	x = x[:len(x)&^(Block-1)]
	if !simd.AVX2 || len(x) == 0 {
		return 0
	}
	return inChunks(len(x), func(from, to int) int {
		return Block * raiseExponentsAVX2(&exponents[from/Block], x[from:to])
	})
}

// storeBlocks stores whole blocks as terms of sums, or adds them.
func storeBlocks(sums []int32, exponents []byte, x []float32, precision int, add bool) int {
	x = x[:len(x)&^(Block-1)]
	if !simd.AVX2 || len(x) == 0 {
		return 0
	}
	return inChunks(len(x), func(from, to int) int {
		return Block * storeFixedAVX2(sums[from:to], &exponents[from/Block], &x[from], precision, add)
	})
}

// loadBlocks stores multiples of the sums of whole blocks as values, clamped to the limit.
func loadBlocks(dst []float32, sums []int32, exponents []byte, multiple, limit float64, precision int) int {
	dst = dst[:len(dst)&^(Block-1)]
	if !simd.AVX2 || len(dst) == 0 {
		return 0
	}
	if p, ok := powersOf(multiple, limit, precision); ok {
		return inChunks(len(dst), func(from, to int) int {
			x := dst[from:to]
			return Block * loadFixedPowerAVX2(x, &sums[from], &exponents[from/Block], p.shift, p.lowest, p.highest)
		})
	}
	return inChunks(len(dst), func(from, to int) int {
		return Block * loadFixedAVX2(dst[from:to], &sums[from], &exponents[from/Block], multiple, float32(limit), precision)
	})
}

// raiseHeight raises top to the heights of whole blocks, until one is not finite.
func raiseHeight(sums []int32, exponents []byte, top *int) int {
	sums = sums[:len(sums)&^(Block-1)]
	if !simd.AVX2 || len(sums) == 0 {
		return 0
	}
	return inChunks(len(sums), func(from, to int) int {
		return Block * heightsAVX2(sums[from:to], &exponents[from/Block], top)
	})
}

// squareBlocks adds the squares of whole blocks, shifted by twice their exponents and an offset, to a total.
func squareBlocks(sums []int32, exponents []byte, offset int, total *[2]uint64) int {
	sums = sums[:len(sums)&^(Block-1)]
	if !simd.AVX2 || len(sums) == 0 {
		return 0
	}
	return inChunks(len(sums), func(from, to int) int {
		return Block * squaresAVX2(sums[from:to], &exponents[from/Block], offset, total)
	})
}

// inChunks calls f for consecutive ranges of elements, until it handles fewer than it got.
func inChunks(n int, f func(from, to int) int) (done int) {
	for done < n {
		to := min(done+step, n)
		handled := f(done, to)
		done += handled
		if done < to {
			break
		}
	}
	return done
}

// exponentBlocks stores the exponents of the whole blocks of some terms, from an element on.
func exponentBlocks(exponents []byte, terms []uintptr, from int) int {
	if !simd.AVX2 || len(terms) == 0 {
		return 0
	}
	return Block * exponentsAVX2(exponents, terms, 4*from)
}

// sumBlocks stores the sums of whole blocks, until a block's terms need more than a product to become integers.
func sumBlocks(sums []int32, exponents []byte, terms []uintptr, from, precision int) int {
	if !simd.AVX2 || len(terms) == 0 || len(exponents) == 0 || precision < 3 {
		return 0
	}
	return Block * sumFixedAVX2(&sums[0], exponents, terms, 4*from, precision, precision-1)
}

// meanBlocks stores multiples of the sums of whole blocks as all results, until a block needs another computation.
func meanBlocks(
	results []uintptr, exponents []byte, terms []uintptr, from, precision int, multiple, limit float64,
) int {
	if !simd.AVX2 || len(terms) == 0 || precision < 3 {
		return 0
	}
	p, ok := powersOf(multiple, limit, precision)
	if ok {
		limits := [3]int{p.shift, max(p.lowest, precision-1), p.highest}
		return Block * meanPowerAVX2(results, exponents, terms, 4*from, precision, &limits)
	}
	limits := [3]int{int(math.Float64bits(multiple)), precision - 1, p.highest - 1}
	return Block * meanAnyAVX2(results, exponents, terms, 4*from, precision, &limits)
}

// powers describes the blocks whose sums become values by multiplication with a power of two.
type powers struct {
	shift           int // how much larger the exponent of the power is, as float32
	lowest, highest int // exponents of blocks
}

// powersOf returns the powers for a multiple, if it is a power of two. A unit must be at least the smallest normal
// number, and small enough that the largest sum, 2^31, is below the limit.
func powersOf(multiple, limit float64, precision int) (p powers, ok bool) {
	fraction, power := math.Frexp(multiple)
	_, top := math.Frexp(limit)
	p.lowest = precision - power + 1
	p.highest = min(top-1-31+bias+p.lowest, notFinite-1)
	p.shift = 1 - p.lowest
	return p, fraction == 0.5
}

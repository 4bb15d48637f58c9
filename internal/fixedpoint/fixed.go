// Package fixedpoint sums floats as integers relative to the largest exponent of each block of 64, as package
// runtime/kernel describes: such sums do not depend on the order of the terms.
package fixedpoint

import (
	"math"
	"math/bits"
)

// Block is the number of elements with a common exponent.
const Block = 64

// bias is the bias of blocks' exponents: values are below 2^(exponent-bias).
const bias = 126

// notFinite is the exponent of a block with a NaN or an infinity.
const notFinite = 255

// exponent is the stored exponent of a block: less 128, so that I8 sorts like exponents.
type exponent byte

const sign = 1 << 7

func (e exponent) field() int { return int(e ^ sign) }

// rows calls f for the blocks of n elements, the first of which lacks skip elements. Adjacent whole blocks are passed
// together.
func rows(n, skip int, f func(b, from, to int)) {
	for from := 0; from < n; {
		b := (skip + from) / Block
		end := (b+1)*Block - skip
		if whole := (n - from) &^ (Block - 1); (skip+from)%Block == 0 && whole > 0 {
			end = from + whole
		}
		end = min(end, n)
		f(b, from, end)
		from = end
	}
}

// RaiseExponents raises the exponents of blocks to those of values.
func RaiseExponents(exponents []byte, x []float32, skip int) {
	rows(len(x), skip, func(b, from, to int) {
		from += raiseBlocks(exponents[b:], x[from:to])
		for ; from < to; from++ {
			e := &exponents[(skip+from)/Block]
			field := byte(math.Float32bits(x[from]) >> 23)
			*e = max(*e^sign, field) ^ sign
		}
	})
}

// Store stores values as terms of sums, or adds them.
func Store(sums []int32, exponents []byte, x []float32, skip, precision int, add bool) {
	rows(len(x), skip, func(b, from, to int) {
		from += storeBlocks(sums[from:to], exponents[b:], x[from:to], precision, add)
		for from < to {
			b := (skip + from) / Block
			end := min((b+1)*Block-skip, to)
			scale := math.Ldexp(1, precision+bias-exponent(exponents[b]).field())
			for i, v := range x[from:end] {
				term := int32(math.RoundToEven(float64(v) * scale))
				if add {
					term += sums[from+i]
				}
				sums[from+i] = term
			}
			from = end
		}
	})
}

// Load stores multiples of sums as values, clamped to the limit.
func Load(dst []float32, sums []int32, exponents []byte, skip, precision int, multiple, limit float64) {
	rows(len(dst), skip, func(_, from, to int) {
		for from < to {
			b := (skip + from) / Block
			if (skip+from)%Block == 0 {
				from += loadBlocks(dst[from:to], sums[from:to], exponents[b:], multiple, limit, precision)
				if from == to {
					return
				}
				b = (skip + from) / Block
			}
			end := min((b+1)*Block-skip, to)
			field := exponent(exponents[b]).field()
			if field == 0 && allZero(sums[from:end]) { // as in gradients of unused parameters
				clear(dst[from:end])
				from = end
				continue
			}
			scale := math.Ldexp(multiple, field-bias-precision)
			if field == notFinite {
				scale = math.NaN()
			}
			for i, sum := range sums[from:end] {
				dst[from+i] = float32(max(-limit, min(float64(sum)*scale, limit)))
			}
			from = end
		}
	})
}

func allZero(sums []int32) bool {
	bits := int32(0)
	for _, s := range sums {
		bits |= s
	}
	return bits == 0
}

// Square returns the sum of the squares of sums. It adds integers, so their order does not matter.
func Square(sums []int32, exponents []byte, skip, precision, divisor int) float64 {
	const unit = 56 // bits of a square below the largest one; plus six for those of a block
	top, finite := height(sums, exponents, skip)
	if !finite {
		return math.NaN()
	}
	offset := unit - 2*top
	var total [2]uint64 // words of 32 bits, the lower one first
	rows(len(sums), skip, func(_, from, to int) {
		for from < to {
			b := (skip + from) / Block
			if (skip+from)%Block == 0 {
				from += squareBlocks(sums[from:to], exponents[b:], offset, &total)
				if from == to {
					return
				}
				b = (skip + from) / Block
			}
			end := min((b+1)*Block-skip, to)
			shift := offset + 2*exponent(exponents[b]).field()
			left := max(shift, 0)
			right := min(max(-shift, 0), 63)
			var squares uint64
			for _, s := range sums[from:end] {
				squares += uint64(int64(s)*int64(s)) << left >> right
			}
			total[0] += squares & math.MaxUint32
			total[1] += squares >> 32
			from = end
		}
	})
	sum := float64(float64(total[1])*(1<<32)) + float64(total[0])
	norm := math.Ldexp(1/float64(divisor), top-bias-precision)
	return math.Ldexp(sum, -unit) * float64(norm*norm)
}

// height returns the largest exponent of a block combined with the length of its largest sum; the terms of a block may
// have canceled. 0: all sums are 0.
func height(sums []int32, exponents []byte, skip int) (top int, finite bool) {
	finite = true
	rows(len(sums), skip, func(_, from, to int) {
		for from < to {
			b := (skip + from) / Block
			if (skip+from)%Block == 0 {
				from += raiseHeight(sums[from:to], exponents[b:], &top)
				if from == to {
					return
				}
				b = (skip + from) / Block
			}
			field := exponent(exponents[b]).field()
			if field == notFinite {
				finite = false
				return
			}
			end := min((b+1)*Block-skip, to)
			var magnitudes uint32
			for _, s := range sums[from:end] {
				magnitudes |= uint32(max(s, -s))
			}
			if magnitudes > 0 {
				top = max(top, field+bits.Len32(magnitudes))
			}
			from = end
		}
	})
	return top, finite
}

// Package f32 has the loops of the sparse kernels over arrays of float32: they select and count by magnitude, sum and
// scale.
package f32

import (
	"math"
)

// MaxKey is the largest magnitude key, the key of a NaN with all bits set.
const MaxKey = 1<<31 - 1

// Key returns the magnitude key of v: the bits of |v| as an unsigned integer. Keys order numbers by magnitude and NaN
// above +Inf; unlike floats, they have a total order.
func Key(v float32) uint32 {
	return math.Float32bits(v) &^ (1 << 31)
}

// SelectRange finds the elements of x whose key is in [lo, hi]. It writes the position (plus base) and the value of
// each to idx and val in ascending order while there is room, and returns the total number. idx and val have the same
// length; entries after the last one may be overwritten. val may be x itself.
func SelectRange(x []float32, base int32, lo, hi uint32, idx []int32, val []float32) (total int) {
	return selectRange(x, base, lo, hi, idx, val, false)
}

// TakeRange is SelectRange that also clears the elements in x that it writes to idx and val; val must not be x.
func TakeRange(x []float32, base int32, lo, hi uint32, idx []int32, val []float32) (total int) {
	return selectRange(x, base, lo, hi, idx, val, true)
}

func selectRange(x []float32, base int32, lo, hi uint32, idx []int32, val []float32, take bool) (total int) {
	if lo > hi {
		return 0
	}
	for {
		done, found := selectBlocks(x, base, lo, hi-lo, idx[total:], val[total:], take)
		x = x[done:]
		base += int32(done)
		total += found
		if len(x) == 0 {
			return total
		}
		// The tail of x, or less room than the block kernel needs: continue element by element, but only where there
		// are any to select.
		part := x[:min(len(x), selectStep)]
		if CountRange(part, lo, hi) > 0 {
			total += selectEach(part, base, lo, hi-lo, idx[total:], val[total:], take)
		}
		x = x[len(part):]
		base += int32(len(part))
		if total >= len(idx) {
			return total + CountRange(x, lo, hi)
		}
	}
}

// Access says how a kernel uses the caches.
type Access uint8

const (
	Cached    Access = iota // as loads and stores do by themselves
	Streaming               // stores bypass the caches, as in [github.com/tutti-go/tutti/internal/hostops.Reduce]
	Ahead                   // gets what follows: the caller comes back for it after other work
)

// AddSelectRange sets every element of x to from[i] + grad[i]*factor, in one pass with SelectRange or TakeRange. The
// product is rounded first. from may be x, val may not.
func AddSelectRange(x, from, grad []float32, factor float32, base int32, lo, hi uint32,
	idx []int32, val []float32, take bool, access Access) (total int) {
	var added, done, found int
	if lo <= hi {
		added, done, found = addSelectBlocks(x, from, grad, factor, base, lo, hi-lo, idx, val, take, access)
	}
	from = from[:len(x)]
	grad = grad[:len(x)]
	for i := added; i < len(x); i++ {
		x[i] = from[i] + float32(grad[i]*factor) // the conversion keeps the compiler from fusing
	}
	return found + selectRange(x[done:], base+int32(done), lo, hi, idx[found:], val[found:], take)
}

// selectStep is the number of elements between two attempts of the block kernel in SelectRange.
const selectStep = 256

// selectEach is selectRange one element at a time; keys are in [lo, lo+width].
func selectEach(x []float32, base int32, lo, width uint32, idx []int32, val []float32, take bool) (total int) {
	for i, v := range x {
		if Key(v)-lo > width {
			continue
		}
		if total < len(idx) {
			idx[total] = base + int32(i)
			val[total] = v
			if take {
				x[i] = 0
			}
		}
		total++
	}
	return total
}

// CountRange returns how many elements of x have a key in [lo, hi].
func CountRange(x []float32, lo, hi uint32) (total int) {
	if lo > hi {
		return 0
	}
	done, total := countBlocks(x, lo, hi-lo)
	for _, v := range x[done:] {
		if Key(v)-lo <= hi-lo {
			total++
		}
	}
	return total
}

// lanes is the number of partial sums of Sum and SquaredDeviations. Element i
// always goes to partial sum i mod lanes, with or without vector instructions,
// so that both give the same bits.
const lanes = 16

// Sum returns the sum of x, accumulated in float64. Like SquaredDeviations it is meant for blocks of a few thousand
// elements, whose results the caller adds up, so that the garbage collector waits for one block at most.
func Sum(x []float32) float64 {
	var acc [lanes]float64
	done := sumBlocks(x, &acc)
	for i, v := range x[done:] {
		acc[i%lanes] += float64(v)
	}
	return fold(&acc)
}

// SquaredDeviations returns the sum of (x[i]-center)^2, accumulated in float64.
func SquaredDeviations(x []float32, center float64) float64 {
	var acc [lanes]float64
	done := squareBlocks(x, center, &acc)
	for i, v := range x[done:] {
		d := float64(v) - center
		acc[i%lanes] += float64(d * d) // the conversion keeps the compiler from fusing
	}
	return fold(&acc)
}

// fold adds the partial sums pairwise.
func fold(acc *[lanes]float64) float64 {
	for half := lanes / 2; half > 0; half /= 2 {
		for i := range half {
			acc[i] += acc[i+half]
		}
	}
	return acc[0]
}

// Scale writes dst[i] = src[i] * s. dst has the length of src and may be src.
func Scale(dst, src []float32, s float32) {
	done := scaleBlocks(dst, src, s)
	dst = dst[done:len(src)]
	for i, v := range src[done:] {
		dst[i] = v * s
	}
}

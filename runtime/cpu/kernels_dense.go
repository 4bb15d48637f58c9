package cpu

import (
	"math"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/simd"
)

// chunk is the number of elements that are taken through a buffer in the
// first-level cache at a time.
const chunk = 4096

// accumulate adds the len(acc) gradients of type dt (F32, F16 or BF16) at grad
// to acc.
func accumulate(acc []float32, grad uintptr, dt dtype.DType) {
	s := scratches.get()
	defer scratches.put(s)
	if dt == dtype.F32 {
		s.add(acc, grad)
		return
	}
	grads := hostmem.Slice[uint16](grad, len(acc))
	for len(acc) > 0 {
		n := min(len(acc), chunk)
		wide := s.chunk[:n]
		if dt == dtype.F16 {
			simd.F16ToF32(wide, grads[:n])
		} else {
			simd.BF16ToF32(wide, grads[:n])
		}
		s.add(acc[:n], hostmem.Addr(wide))
		acc, grads = acc[n:], grads[n:]
	}
}

// store writes src, scaled and rounded to dt (F32, F16 or BF16), to dst.
func store(dst uintptr, dt dtype.DType, src []float32, scale float32) {
	if dt == dtype.F32 {
		simd.Scale(floats(dst, len(src)), src, scale)
		return
	}
	s := scratches.get()
	defer scratches.put(s)
	out := hostmem.Slice[uint16](dst, len(src))
	for len(src) > 0 {
		n := min(len(src), chunk)
		scaled := s.chunk[:n]
		simd.Scale(scaled, src[:n], scale)
		if dt == dtype.F16 {
			simd.F32ToF16(out[:n], scaled)
		} else {
			simd.F32ToBF16(out[:n], scaled)
		}
		src, out = src[n:], out[n:]
	}
}

// statsBlock is the number of elements whose sums are formed before they are
// merged: their second reading comes from the first-level cache.
const statsBlock = 4096

// meanStd forms the mean and the squared deviations of each block on their own
// and merges them as Chan, Golub and LeVeque do ("Updating Formulae and a
// Pairwise Algorithm for Computing Sample Variances", 1979), so that a mean far
// from zero costs no accuracy.
func meanStd(x []float32) (mean, std float64) {
	if len(x) == 0 {
		return 0, 0
	}
	var sum, squares float64
	for done := 0; done < len(x); {
		block := x[done:min(done+statsBlock, len(x))]
		size := float64(len(block))
		blockSum := simd.Sum(block)
		center := blockSum / size
		squares += simd.SquaredDeviations(block, center)
		if done > 0 {
			before := float64(done)
			delta := center - sum/before
			squares += delta * delta * (before * size / (before + size))
		}
		sum += blockSum
		done += len(block)
	}
	n := float64(len(x))
	return sum / n, math.Sqrt(squares / n)
}

// sumSquares adds the squares block by block, in float64.
func sumSquares(x []float32) (sum float64) {
	for len(x) > 0 {
		block := x[:min(len(x), statsBlock)]
		sum += simd.SquaredDeviations(block, 0)
		x = x[len(block):]
	}
	return sum
}

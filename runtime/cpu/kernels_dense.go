package cpu

import (
	"math"
	"unsafe"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/convert"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/simd"
	"github.com/tutti-go/tutti/runtime/cpu/internal/f32"
)

// chunk is the number of elements that are handled while they are in the
// first-level cache.
const chunk = 4096

// streamFrom is the number of elements from which on the sums with a gradient bypass the
// caches: gradient, sums and what the gradient is added to fill three quarters of the
// last-level cache then, and a store to a line that is not there would read it first.
var streamFrom = max(simd.Cache, smallCache) / 16

// smallCache is the least size of a cache that streamFrom is made for.
const smallCache = 32 << 20

// streamTile is the number of elements that a merge writes past the caches at a time: it
// waits for each to be written, and has them in the second-level cache before.
const streamTile = 1 << 14

// source is a [kernel.Source] whose numbers have been read.
type source struct {
	x      []float32   // what is selected from; sums with grad go there
	grad   uintptr     // 0 if there is none, or it has been added
	from   []float32   // what it is added to; x, or as long
	keep   []float32   // gets what that is, if it is not empty
	dt     dtype.DType // of grad
	factor float32     // of grad
	scaled bool        // by factor; if not, factor is 1
	take   bool        // what is selected becomes 0 in x
	access f32.Access  // to x, from and grad, unless another one is faster
}

// part returns the source of some elements.
func (src *source) part(from, to int) source {
	part := *src
	part.x = src.x[from:to]
	if src.grad == 0 {
		return part
	}
	part.grad += uintptr(from * src.dt.Size())
	part.from = src.from[from:to]
	if len(src.keep) > 0 {
		part.keep = src.keep[from:to]
	}
	return part
}

// keepPart keeps what the gradients of some elements are added to, if that is wanted.
func (src *source) keepPart(from, to int) {
	if len(src.keep) > 0 {
		copy(src.keep[from:to], src.from[from:to])
	}
}

// accumulate makes x[from:to] the sums with the gradients of these elements.
func (s *scratch) accumulate(src *source, from, to int) {
	if src.grad == 0 {
		return
	}
	src.keepPart(from, to)
	if src.dt == dtype.F32 && !src.scaled {
		s.add(src.x[from:to], src.from[from:to], src.grad+uintptr(from*src.dt.Size()))
		return
	}
	for from < to {
		block := src.x[from:min(to, from+chunk)]
		terms := s.widen(src.grad+uintptr(from*src.dt.Size()), src.dt, len(block))
		if src.scaled {
			scaled := s.chunk[:len(terms)]
			f32.Scale(scaled, terms, src.factor)
			terms = scaled
		}
		s.add(block, src.from[from:from+len(block)], hostmem.Addr(terms))
		from += len(block)
	}
}

// add writes the sums of from and the len(dst) float32 at x.
func (s *scratch) add(dst, from []float32, x uintptr) {
	s.dst[0] = hostmem.Addr(dst)
	s.src = [2]uintptr{hostmem.Addr(from), x}
	hostops.Reduce(s.dst[:], s.src[:], len(dst), dtype.F32, reductions.Sum, false)
}

// widen returns the n elements of type dt at x as float32. Elements of another type, at most chunk, are in s.chunk
// then.
func (s *scratch) widen(x uintptr, dt dtype.DType, n int) []float32 {
	if dt == dtype.F32 {
		return floats(x, n)
	}
	wide := s.chunk[:n]
	if dt == dtype.F16 {
		convert.F16ToF32(wide, hostmem.Slice[uint16](x, n))
	} else {
		convert.BF16ToF32(wide, hostmem.Slice[uint16](x, n))
	}
	return wide
}

// store writes src, scaled and rounded to dt, to dst. By what elements are too large for dt is
// added to excess, if there is such an array.
func (s *scratch) store(dst uintptr, dt dtype.DType, src []float32, scale float32, excess []float32) {
	if dt == dtype.F32 {
		f32.Scale(floats(dst, len(src)), src, scale)
		return
	}
	for len(src) > 0 {
		scaled := s.chunk[:min(len(src), chunk)]
		f32.Scale(scaled, src[:len(scaled)], scale)
		if excess != nil {
			saturate(scaled, excess, dt)
			excess = excess[len(scaled):]
		}
		out := hostmem.Slice[uint16](dst, len(scaled))
		if dt == dtype.F16 {
			convert.F32ToF16(out, scaled)
		} else {
			convert.F32ToBF16(out, scaled)
		}
		src = src[len(scaled):]
		dst += uintptr(len(scaled)) * unsafe.Sizeof(uint16(0))
	}
}

// saturate adds to excess what finite elements of x are beyond the largest number
// of dt, and makes these that number.
func saturate(x, excess []float32, dt dtype.DType) {
	largest := fixedpoint.Largest(dt)
	lowest := f32.Key(float32(largest)) + 1
	infinite := f32.Key(float32(math.Inf(1)))
	if f32.CountRange(x, lowest, infinite-1) == 0 {
		return
	}
	for i, v := range x {
		key := f32.Key(v)
		if lowest <= key && key < infinite {
			x[i] = float32(math.Copysign(largest, float64(v)))
			excess[i] += v - x[i]
		}
	}
}

// scale multiplies the n elements at x.
func (s *scratch) scale(x uintptr, dt dtype.DType, n int, factor float32) {
	step := n
	if dt != dtype.F32 {
		step = chunk
	}
	for ; n > 0; n -= step {
		s.store(x, dt, s.widen(x, dt, min(n, step)), factor, nil)
		x += uintptr(step * dt.Size())
	}
}

// meanStd adds the gradients of src and returns mean and standard deviation. It
// forms those of each block on their own and merges them as Chan, Golub and LeVeque do ("Updating Formulae and a
// Pairwise Algorithm for Computing Sample Variances", 1979), so that a mean far
// from zero costs no accuracy.
func (s *scratch) meanStd(src *source) (mean, std float64) {
	if len(src.x) == 0 {
		return 0, 0
	}
	var sum, squares float64
	for done := 0; done < len(src.x); {
		block := src.x[done:min(done+chunk, len(src.x))]
		s.accumulate(src, done, done+len(block))
		size := float64(len(block))
		blockSum := f32.Sum(block)
		center := blockSum / size
		squares += f32.SquaredDeviations(block, center)
		if done > 0 {
			before := float64(done)
			delta := center - sum/before
			squares += float64(delta * delta * (before * size / (before + size)))
		}
		sum += blockSum
		done += len(block)
	}
	n := float64(len(src.x))
	return sum / n, math.Sqrt(squares / n)
}

// sumSquares adds the squares block by block, in float64.
func (s *scratch) sumSquares(x uintptr, dt dtype.DType, n int) (sum float64) {
	for n > 0 {
		block := s.widen(x, dt, min(n, chunk))
		sum += f32.SquaredDeviations(block, 0)
		x += uintptr(len(block) * dt.Size())
		n -= len(block)
	}
	return sum
}

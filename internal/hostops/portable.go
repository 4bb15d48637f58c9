package hostops

import (
	"math"
	"unsafe"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/reductions"
)

// blockLen is the number of elements that the portable reduction accumulates before it stores them. A block is on the
// stack and in the first-level cache.
const blockLen = 256

// number is the type that the portable reduction computes in. The built-in min and max have the semantics that this
// package promises, for integers and floats.
type number interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | float32 | float64
}

// reducePortable is Reduce in Go. It has no streaming stores.
func reducePortable(dsts, srcs []uintptr, n int, dt dtype.DType, op reductions.Op) {
	switch dt {
	case dtype.F64:
		reduceNumbers[float64](dsts, srcs, n, op)
	case dtype.F32:
		reduceNumbers[float32](dsts, srcs, n, op)
	case dtype.F16, dtype.BF16, dtype.FP8E4M3, dtype.FP8E5M2:
		reduceWidened(dsts, srcs, n, dt, op)
	case dtype.I64:
		reduceNumbers[int64](dsts, srcs, n, op)
	case dtype.I32:
		reduceNumbers[int32](dsts, srcs, n, op)
	case dtype.I16:
		reduceNumbers[int16](dsts, srcs, n, op)
	case dtype.I8:
		reduceNumbers[int8](dsts, srcs, n, op)
	case dtype.U64:
		reduceNumbers[uint64](dsts, srcs, n, op)
	case dtype.U32:
		reduceNumbers[uint32](dsts, srcs, n, op)
	case dtype.U16:
		reduceNumbers[uint16](dsts, srcs, n, op)
	case dtype.U8:
		reduceNumbers[uint8](dsts, srcs, n, op)
	case dtype.Bool:
		reduceBools(dsts, srcs, n, op)
	}
}

// reduceNumbers combines blocks of elements that are computed in their own type. All sources of a block are read
// before a destination is written, so that a destination can be a source.
func reduceNumbers[T number](dsts, srcs []uintptr, n int, op reductions.Op) {
	var block [blockLen]T
	for from := 0; from < n; from += blockLen {
		acc := block[:min(blockLen, n-from)]
		copy(acc, window[T](srcs[0], from, len(acc)))
		for _, src := range srcs[1:] {
			combine(op, acc, window[T](src, from, len(acc)))
		}
		if op == reductions.Avg {
			divide(acc, T(len(srcs)))
		}
		for _, dst := range dsts {
			copy(window[T](dst, from, len(acc)), acc)
		}
	}
}

// reduceWidened is reduceNumbers for 16-bit and 8-bit floats: it accumulates in float32 and rounds when it stores.
func reduceWidened(dsts, srcs []uintptr, n int, dt dtype.DType, op reductions.Op) {
	var block, widened [blockLen]float32
	var rounded [2 * blockLen]byte
	size := dt.Size()
	part := func(p uintptr, from, n int) []byte {
		return window[byte](p, from*size, n*size)
	}
	for from := 0; from < n; from += blockLen {
		acc := block[:min(blockLen, n-from)]
		must(dtype.ToFloat32(acc, part(srcs[0], from, len(acc)), dt))
		for _, src := range srcs[1:] {
			next := widened[:len(acc)]
			must(dtype.ToFloat32(next, part(src, from, len(acc)), dt))
			combine(op, acc, next)
		}
		if op == reductions.Avg {
			divide(acc, float32(len(srcs)))
		}
		result := rounded[:len(acc)*size]
		must(dtype.FromFloat32(result, dt, acc))
		for _, dst := range dsts {
			copy(part(dst, from, len(acc)), result)
		}
	}
}

// must panics at an impossible error: a conversion of buffers of different lengths.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// reduceBools combines truth values: "or" for Sum and Max, "and" for Prod and Min.
func reduceBools(dsts, srcs []uintptr, n int, op reductions.Op) {
	var block [blockLen]uint8
	and := op == reductions.Prod || op == reductions.Min
	for from := 0; from < n; from += blockLen {
		acc := block[:min(blockLen, n-from)]
		for i, b := range window[uint8](srcs[0], from, len(acc)) {
			acc[i] = truth(b)
		}
		for _, src := range srcs[1:] {
			for i, b := range window[uint8](src, from, len(acc)) {
				if and {
					acc[i] &= truth(b)
				} else {
					acc[i] |= truth(b)
				}
			}
		}
		for _, dst := range dsts {
			copy(window[uint8](dst, from, len(acc)), acc)
		}
	}
}

func truth(b uint8) uint8 {
	if b != 0 {
		return 1
	}
	return 0
}

// window returns n elements of the buffer at address p, beginning with element from.
func window[T any](p uintptr, from, n int) []T {
	var t T
	return hostmem.Slice[T](p+uintptr(from)*unsafe.Sizeof(t), n)
}

// combine sets acc[i] = acc[i] op src[i].
func combine[T number](op reductions.Op, acc, src []T) {
	switch op {
	case reductions.Sum, reductions.Avg:
		addTo(acc, src)
	case reductions.Prod:
		mulTo(acc, src)
	case reductions.Min:
		minTo(acc, src)
	case reductions.Max:
		maxTo(acc, src)
	}
}

// The loops below handle eight elements a turn through array pointers, which
// the compiler indexes without bounds checks.

// addTo sets acc[i] += src[i].
func addTo[T number](acc, src []T) {
	for len(acc) >= 8 && len(src) >= 8 {
		a := (*[8]T)(acc)
		s := (*[8]T)(src)
		a[0] += s[0]
		a[1] += s[1]
		a[2] += s[2]
		a[3] += s[3]
		a[4] += s[4]
		a[5] += s[5]
		a[6] += s[6]
		a[7] += s[7]
		acc = acc[8:]
		src = src[8:]
	}
	for i, s := range src[:len(acc)] {
		acc[i] += s
	}
}

// mulTo sets acc[i] *= src[i].
func mulTo[T number](acc, src []T) {
	for len(acc) >= 8 && len(src) >= 8 {
		a := (*[8]T)(acc)
		s := (*[8]T)(src)
		a[0] *= s[0]
		a[1] *= s[1]
		a[2] *= s[2]
		a[3] *= s[3]
		a[4] *= s[4]
		a[5] *= s[5]
		a[6] *= s[6]
		a[7] *= s[7]
		acc = acc[8:]
		src = src[8:]
	}
	for i, s := range src[:len(acc)] {
		acc[i] *= s
	}
}

// minTo sets acc[i] to the smaller of acc[i] and src[i].
func minTo[T number](acc, src []T) {
	for len(acc) >= 8 && len(src) >= 8 {
		a := (*[8]T)(acc)
		s := (*[8]T)(src)
		a[0] = quiet(min(a[0], s[0]))
		a[1] = quiet(min(a[1], s[1]))
		a[2] = quiet(min(a[2], s[2]))
		a[3] = quiet(min(a[3], s[3]))
		a[4] = quiet(min(a[4], s[4]))
		a[5] = quiet(min(a[5], s[5]))
		a[6] = quiet(min(a[6], s[6]))
		a[7] = quiet(min(a[7], s[7]))
		acc = acc[8:]
		src = src[8:]
	}
	for i, s := range src[:len(acc)] {
		acc[i] = quiet(min(acc[i], s))
	}
}

// maxTo sets acc[i] to the larger of acc[i] and src[i].
func maxTo[T number](acc, src []T) {
	for len(acc) >= 8 && len(src) >= 8 {
		a := (*[8]T)(acc)
		s := (*[8]T)(src)
		a[0] = quiet(max(a[0], s[0]))
		a[1] = quiet(max(a[1], s[1]))
		a[2] = quiet(max(a[2], s[2]))
		a[3] = quiet(max(a[3], s[3]))
		a[4] = quiet(max(a[4], s[4]))
		a[5] = quiet(max(a[5], s[5]))
		a[6] = quiet(max(a[6], s[6]))
		a[7] = quiet(max(a[7], s[7]))
		acc = acc[8:]
		src = src[8:]
	}
	for i, s := range src[:len(acc)] {
		acc[i] = quiet(max(acc[i], s))
	}
}

// quiet replaces any NaN by the NaN that has only the quiet bit set. Integers
// equal themselves, so for them the compiler drops the test.
func quiet[T number](x T) T {
	if x != x {
		return T(math.Float64frombits(0x7ff8 << 48))
	}
	return x
}

// divide sets acc[i] /= by.
func divide[T number](acc []T, by T) {
	for i := range acc {
		acc[i] /= by
	}
}

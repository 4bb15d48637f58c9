package sparse

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// quantized reduces the whole residual, densely, rounded: each rank sends every other one its share of the
// elements in the codec, adds up what it receives in its own, in F32 and in the order of the ranks,
// rounds the sums, and all ranks gather them. What the first rounding loses stays with each rank, and what the second one does
// with the rank that adds up. So it sends a quarter to a 32nd of an allreduce, and all ranks have the same bits.
//
// Where the host waits for messages, shares go in segments: while those of one segment are in flight, it rounds
// the next one, adds up the one before, and decodes what was gathered. The bits do not depend on that.
type quantized struct {
	*engine
	part, length  int         // elements of a rank's share, and of a segment of it
	count         int         // segments
	out, in, sums base.Buffer // codes, by segment and rank; the sums of a segment
	dense         uintptr
}

const (
	mostSegments = 8
	leastSegment = 16 * runtime.CodecGroup
)

func (x *quantized) run(ctx context.Context, _ runtime.Entries) result {
	x.part = (x.n + x.size - 1) / x.size
	x.length = x.part
	if x.order.Streams == nil {
		groups := (x.part + runtime.CodecGroup - 1) / runtime.CodecGroup
		x.length = min(x.part, max((groups+mostSegments-1)/mostSegments*runtime.CodecGroup, leastSegment))
	}
	x.count = (x.part + x.length - 1) / x.length
	bytes := x.count * x.size * x.words(0) * base.WordSize
	x.allocate(&x.out, bytes)
	x.allocate(&x.in, bytes)
	x.allocate(&x.sums, x.length*base.WordSize)
	x.dense = x.denseResult()
	for t := range x.count + 4 {
		x.segment(t-1, x.exchange)
		x.segment(t-3, x.gather)
		if len(x.group) > 0 {
			x.submit(ctx)
		}
		x.segment(t, x.round)
		x.segment(t-2, x.reduce)
		x.segment(t-4, x.decode)
		x.arrive(ctx)
	}
	return result{dense: x.dense, scale: x.average}
}

// segment does a part of the work on a segment, if there is such.
func (x *quantized) segment(s int, work func(s int)) {
	if x.err == nil && 0 <= s && s < x.count {
		work(s)
	}
}

// words is the length of a rank's codes of a segment.
func (x *quantized) words(s int) int {
	return x.codec.Size(min(x.length, x.part-s*x.length)) / base.WordSize
}

// codes is where those of a rank are.
func (x *quantized) codes(b base.Buffer, s, rank int) uintptr {
	return base.At(b.Ptr, s*x.size*x.words(0)+rank*x.words(s))
}

// elements are those of a segment of a rank's share.
func (x *quantized) elements(s, rank int) (first, n int) {
	first = min(rank*x.part+s*x.length, x.n)
	return first, min(x.length, x.part-s*x.length, x.n-first)
}

// round rounds what this rank sends, and makes the residual what that loses.
func (x *quantized) round(s int) {
	for r := range x.size {
		if first, n := x.elements(s, r); r != x.rank {
			x.quantize(x.codes(x.out, s, r), base.At(x.residual, first), n, first)
		}
	}
}

func (x *quantized) exchange(s int) {
	x.add(comm.AllToAllCall(x.codes(x.out, s, 0), x.codes(x.in, s, 0), x.words(s), dtype.I32))
}

// reduce adds up this rank's share, and rounds that.
func (x *quantized) reduce(s int) {
	first, n := x.elements(s, x.rank)
	x.fill(x.sums.Ptr, n)
	for r := range x.size {
		switch {
		case x.err != nil || n == 0:
		case r == x.rank:
			x.check(x.kernels.Accumulate(runtime.Source{X: x.sums.Ptr, N: n, Grad: base.At(x.residual, first), DType: dtype.F32}))
		default:
			x.check(x.kernels.Dequantize(x.sums.Ptr, x.codec, x.codes(x.in, s, r), n, true))
		}
	}
	x.quantize(x.codes(x.out, s, x.rank), x.sums.Ptr, n, first)
}

func (x *quantized) gather(s int) {
	x.add(comm.AllGatherCall(x.codes(x.out, s, x.rank), x.codes(x.out, s, 0), x.words(s), dtype.I32))
}

// decode makes the result of what all ranks have added up.
func (x *quantized) decode(s int) {
	for r := range x.size {
		if first, n := x.elements(s, r); x.err == nil && n > 0 {
			x.check(x.kernels.Dequantize(base.At(x.dense, first), x.codec, x.codes(x.out, s, r), n, false))
		}
	}
}

// quantize makes the residual what it loses, from an element on.
func (x *quantized) quantize(dst, src uintptr, n, first int) {
	lost := base.At(x.residual, first)
	if x.cfg.NoErrorFeedback {
		lost = 0
	}
	if x.err == nil && n > 0 {
		x.check(x.kernels.Quantize(dst, x.codec, src, n, lost))
	}
}

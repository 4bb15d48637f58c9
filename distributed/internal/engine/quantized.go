package engine

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// quantized adds the gradient to the residual, unless the selector did, and reduces the whole residual, densely and
// rounded. Each rank sends every other rank its share of the elements in the codec, adds up its own share in F32 and
// in rank order, and rounds the sums, which all ranks gather. The first rounding error stays on each rank, and the
// second one on the rank that adds up. It sends a quarter to a 32nd of an allreduce, and all ranks have the same bits.
type quantized struct {
	*engine
	codes    base.Buffer // encoded data, sent and received
	sums     base.Buffer // of this rank's share, in F32
	stepwise bool        // the communicator has no operation for it
}

func (x *quantized) run(ctx context.Context, _ kernel.Entries) result {
	dense := x.denseResult()
	if r, ok := comm.As[backend.Rounder](x.c); ok && !x.stepwise {
		x.keep()
		x.fence(ctx)
		if x.err != nil {
			return result{}
		}
		src := x.source(x.addend)
		src.Take = !x.cfg.NoErrorFeedback
		err := r.AllReduceRounded(src, dense, x.codec, comm.Avg)
		if !errors.Is(err, comm.ErrUnsupported) {
			x.check(err)
			x.inFlight = true
			x.arrive(ctx)
			return result{dense: dense, scale: 1}
		}
		x.stepwise = true
	}
	x.accumulate(x.addend)
	x.flagInput(x.residual, dtype.F32)
	share := (x.n + x.size - 1) / x.size
	words := x.codec.Size(share) / base.WordSize
	part := func(rank int) (first, n int) { // of the elements
		first = min(rank*share, x.n)
		return first, min(share, x.n-first)
	}
	x.allocate(&x.codes, 2*x.size*words*base.WordSize)
	x.allocate(&x.sums, share*base.WordSize)
	out := x.codes.Ptr
	in := base.At(x.codes.Ptr, x.size*words)
	for r := range x.size {
		if first, n := part(r); r != x.rank {
			x.quantize(base.At(out, r*words), base.At(x.residual, first), n, first)
		}
	}
	x.communicate(ctx, comm.AllToAllCall(out, in, words, dtype.I32))
	start, n := part(x.rank)
	x.fill(x.sums.Ptr, n)
	for r := range x.size {
		switch {
		case x.err != nil || n == 0:
		case r == x.rank:
			x.check(x.kernels.Accumulate(kernel.Source{
				X:     x.sums.Ptr,
				N:     n,
				Grad:  base.At(x.residual, start),
				DType: dtype.F32,
			}))
		default:
			x.check(x.kernels.Dequantize(x.sums.Ptr, x.codec, base.At(in, r*words), n, true))
		}
	}
	code := base.At(out, x.rank*words)
	x.quantize(code, x.sums.Ptr, n, start)
	x.communicate(ctx, comm.AllGatherCall(code, out, words, dtype.I32))
	for r := range x.size {
		if first, n := part(r); x.err == nil && n > 0 {
			x.check(x.kernels.Dequantize(base.At(dense, first), x.codec, base.At(out, r*words), n, false))
		}
	}
	return result{dense: dense, scale: x.average}
}

// quantize replaces the residual by its rounding errors, from an element on.
func (x *quantized) quantize(dst, src uintptr, n, first int) {
	lost := base.At(x.residual, first)
	if x.cfg.NoErrorFeedback {
		lost = 0
	}
	if x.err == nil && n > 0 {
		x.check(x.kernels.Quantize(dst, x.codec, src, n, lost))
	}
}

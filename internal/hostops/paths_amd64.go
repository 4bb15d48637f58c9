package hostops

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/simd"
)

// streamAlign is the alignment of streaming stores: a cache line, so that each line is written to memory as a whole.
const streamAlign = 64

// reduceAVX2 is Reduce for n elements beginning at from. If stream is set, aligned stores bypass the caches.
//
//go:noescape
func reduceAVX2(dsts, srcs []uintptr, from, n int, stream bool, dt dtype.DType, op reductions.Op)

func reduce(dsts, srcs []uintptr, n int, dt dtype.DType, op reductions.Op, stream bool) {
	if !simd.AVX2 || !vectorized(dt, op) {
		reducePortable(dsts, srcs, n, dt, op)
		return
	}
	from := 0
	size := dt.Size()
	if stream {
		from, stream = streamStart(dsts, size)
		if stream {
			from = min(from, n)
			reduceAVX2(dsts, srcs, 0, from, false, dt, op)
		}
	}
	for chunk := simd.Chunk / size; from < n; from += chunk {
		reduceAVX2(dsts, srcs, from, min(chunk, n-from), stream, dt, op)
	}
}

// vectorized reports whether reduceAVX2 has a kernel. It has kernels for the reductions of gradients and their
// compressed forms; its dispatch has no default.
func vectorized(dt dtype.DType, op reductions.Op) bool {
	switch dt {
	case dtype.F64, dtype.F32, dtype.F16, dtype.BF16:
		return op != reductions.Prod
	case dtype.FP8E4M3, dtype.FP8E5M2:
		return op == reductions.Sum || op == reductions.Avg
	case dtype.I32, dtype.U32, dtype.I8, dtype.U8:
		return op == reductions.Sum
	}
	return false
}

// streamStart returns the number of elements before the first one that is
// aligned for streaming stores in all dsts, and whether there is one.
func streamStart(dsts []uintptr, size int) (elements int, ok bool) {
	bytes := -dsts[0] % streamAlign
	for _, dst := range dsts[1:] {
		if -dst%streamAlign != bytes {
			return 0, false
		}
	}
	return int(bytes) / size, int(bytes)%size == 0
}

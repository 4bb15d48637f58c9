// Package hostops reduces and copies buffers in host memory. It trusts its arguments: backends and runtimes check
// their users' arguments first.
package hostops

//go:generate env GOWORK=off go run -C ../simd/gen ./arith -of reductions -out ../../hostops/avx2_amd64.s -pkg hostops

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/reductions"
)

// Reduce combines count elements of all srcs, in the order of srcs, and stores the result in each of dsts. Both hold
// addresses of host buffers.
//
//	dst[i] = srcs[0][i] op srcs[1][i] op … (then / len(srcs) for Avg)
//
// F16, BF16 and the FP8 types are accumulated in float32 and rounded once, to nearest even; FP8 saturates as
// [dtype.FromFloat32] does. Avg divides the sum once. Integers wrap around, Bool follows [reductions.Op.Defined]. Min
// and Max of floats are minimum and maximum of IEEE 754-2019: a NaN in any source gives the NaN with only the quiet
// bit set, and -0 is less than +0. A single source is copied bit by bit (a Bool becomes 0 or 1). All ranks that
// combine the same sources in the same order store the same bits, whatever their processor's vector instructions,
// except for the payload and sign of a NaN from an addition or multiplication.
//
// Each source is read once and each destination written once. A destination may be one of the sources; other overlaps
// are not allowed.
//
// streaming requests stores that bypass the caches, which pays if the destinations are larger than the caches and are
// not read again soon. The stores are visible to other processors when Reduce returns. Reduce ignores the hint if
// destinations are aligned differently.
//
// There must be at least one source, every address must have count elements, and op must be defined on dt. Reduce
// allocates nothing and may be called from several goroutines at once.
func Reduce(dsts, srcs []uintptr, count int, dt dtype.DType, op reductions.Op, streaming bool) {
	if count <= 0 || len(dsts) == 0 {
		return
	}
	if len(srcs) == 1 && dt != dtype.Bool {
		// Bytes are copied unchanged: no NaN is quieted, nothing is divided.
		count *= dt.Size()
		dt = dtype.U8
		op = reductions.Sum
	}
	reduce(dsts, srcs, count, dt, op, streaming)
}

// Copy copies bytes from the host buffer at address src to the one at dst. They must not overlap unless they are
// equal. streaming is as in [Reduce].
func Copy(dst, src uintptr, bytes int, streaming bool) {
	if bytes <= 0 || dst == src {
		return
	}
	if streaming {
		dsts := [...]uintptr{dst}
		srcs := [...]uintptr{src}
		reduce(dsts[:], srcs[:], bytes, dtype.U8, reductions.Sum, true)
		return
	}
	copy(hostmem.Slice[byte](dst, bytes), hostmem.Slice[byte](src, bytes))
}

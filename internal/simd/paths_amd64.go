package simd

import "golang.org/x/sys/cpu"

// hasAVX2 reports whether the assembly of this package can run. F16C is a
// feature of its own, which golang.org/x/sys/cpu does not report; a hypervisor
// may hide it. The operating system saves the registers if it does for AVX2.
var hasAVX2 = cpu.X86.HasAVX2 && cpuid1ecx()&cpuidF16C != 0

const cpuidF16C = 1 << 29

// reduceChunk is the number of bytes of each buffer that one call of a kernel
// handles. Assembly cannot be preempted, and a chunk takes some ten
// microseconds, so the garbage collector does not wait long.
const reduceChunk = 256 << 10

// streamAlign is the alignment of streaming stores: a cache line, so that each
// is written to memory as a whole.
const streamAlign = 64

func reduce(k Kind, op Op, dsts, srcs []uintptr, n int, stream bool) {
	if !hasAVX2 {
		reducePortable(k, op, dsts, srcs, n)
		return
	}
	from := 0
	if stream {
		if from, stream = streamStart(dsts, k.Size()); stream {
			from = min(from, n)
			reduceAVX2(k, op, dsts, srcs, 0, from, false)
		}
	}
	for chunk := reduceChunk / k.Size(); from < n; from += chunk {
		reduceAVX2(k, op, dsts, srcs, from, min(chunk, n-from), stream)
	}
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

func f16ToF32(dst []float32, src []uint16) {
	if hasAVX2 {
		f16ToF32AVX2(dst, src)
	} else {
		f16ToF32Portable(dst, src)
	}
}

func f32ToF16(dst []uint16, src []float32) {
	if hasAVX2 {
		f32ToF16AVX2(dst, src)
	} else {
		f32ToF16Portable(dst, src)
	}
}

func bf16ToF32(dst []float32, src []uint16) {
	if hasAVX2 {
		bf16ToF32AVX2(dst, src)
	} else {
		bf16ToF32Portable(dst, src)
	}
}

func f32ToBF16(dst []uint16, src []float32) {
	if hasAVX2 {
		f32ToBF16AVX2(dst, src)
	} else {
		f32ToBF16Portable(dst, src)
	}
}

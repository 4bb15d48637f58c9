package cpu

import "github.com/tutti-go/tutti/internal/simd"

// Copy copies bytes from the host buffer at address src to the one at dst,
// which do not overlap unless they are equal. streaming makes the stores
// bypass the caches: right for copies larger than these.
func Copy(dst, src uintptr, bytes int, streaming bool) {
	if bytes <= 0 || dst == src {
		return
	}
	simd.Copy(dst, src, bytes, streaming)
}

package simd

import "testing"

// eachPath runs a test over the portable code and, where the processor can,
// over the assembly.
func eachPath(t *testing.T, test func(t *testing.T)) {
	detected := hasAVX2
	t.Cleanup(func() { hasAVX2 = detected })
	hasAVX2 = false
	t.Run("portable", test)
	if detected {
		hasAVX2 = true
		t.Run("avx2", test)
	}
}

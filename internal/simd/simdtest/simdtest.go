// Package simdtest has common parts of the tests of packages with assembly: both code paths, buffers with guarded
// ends, and a reference for the element types' arithmetic.
package simdtest

import (
	"testing"

	"github.com/tutti-go/tutti/internal/simd"
)

// EachPath runs a test over the portable code and, if the processor supports it, over the assembly.
func EachPath(t *testing.T, test func(t *testing.T)) {
	detected := simd.AVX2
	t.Cleanup(func() { simd.AVX2 = detected })
	simd.AVX2 = false
	t.Run("portable", test)
	if detected {
		simd.AVX2 = true
		t.Run("avx2", test)
	}
}

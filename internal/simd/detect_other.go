//go:build !amd64

package simd

// Only amd64 has assembly.
func detect() bool { return false }

func largestCache() int { return 0 }

//go:build !amd64

package simd

// There is assembly for amd64 only.
func detect() bool { return false }

func largestCache() int { return 0 }

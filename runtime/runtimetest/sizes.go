//go:build !race

package runtimetest

// kernelSizes straddle the block sizes that kernels work in.
var kernelSizes = []int{0, 1, 2, 7, 64, 1000, 4097, 65537, 100_003}

// longSize is that of one array that every kernel of importance is tried on.
var longSize = 1<<20 + 3

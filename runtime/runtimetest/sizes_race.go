//go:build race

package runtimetest

// kernelSizes are fewer and smaller under the race detector, which makes the
// references an order of magnitude slower.
var kernelSizes = []int{0, 1, 2, 7, 64, 1000, 4097, 10_007}

// longSize is that of one array that every kernel of importance is tried on.
var longSize = 1<<17 + 3

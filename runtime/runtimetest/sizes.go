package runtimetest

import (
	"testing"

	"github.com/tutti-go/tutti/internal/race"
)

// kernelSizes straddle the block sizes that kernels work in. They are fewer and smaller with -short, and under the race
// detector, which makes the references an order of magnitude slower, and more with TUTTI_EXTENDED set.
func kernelSizes() []int {
	switch {
	case testing.Short() || race.Enabled:
		return []int{0, 1, 2, 7, 64, 1000, 4097, 10_007}
	case extended:
		return []int{0, 1, 2, 7, 64, 1000, 4097, 65537, 100_003}
	}
	return []int{0, 1, 2, 7, 64, 1000, 4097, 32_771}
}

// longSize is the size of one array that every kernel of importance is tried on.
func longSize() int {
	if testing.Short() || race.Enabled {
		return 1<<17 + 3
	}
	if extended {
		return 1<<20 + 3
	}
	return 1<<19 + 3
}

package main

import (
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/runtime"
)

// random is a [sparse.Selector] that selects at random (random-k) without reading entries. It selects the same
// entries on all ranks, and different ones in each step.
type random struct{}

// Select implements [sparse.Selector]. It selects on the host, for memory of any runtime.
func (random) Select(step int, sum, indices, values *runtime.Tensor) error {
	all, err := runtime.ToSlice[float32](sum)
	if err != nil {
		return err
	}
	order := rand.New(rand.NewPCG(2, uint64(step))).Perm(len(all))
	order = order[:indices.Len()]
	slices.Sort(order)
	numbers := make([]int32, len(order))
	selected := make([]float32, len(order))
	for i, number := range order {
		numbers[i] = int32(number)
		selected[i] = all[number]
	}
	if err := runtime.CopyIn(indices, numbers); err != nil {
		return err
	}
	return runtime.CopyIn(values, selected)
}

// String implements [sparse.Selector].
func (random) String() string { return "random" }

package main

import (
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/runtime"
)

// random is a [sparse.Selector] that selects by chance (random-k), which reads no entry: others in each step, and the
// same on all ranks.
type random struct{}

// Select implements [sparse.Selector]. It selects on the host, in memory of any runtime.
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

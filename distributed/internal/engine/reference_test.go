package engine_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestReference compares what the exact patterns select, combine and keep with loops over
// all elements: conservation alone would not tell which entries are sent.
// Gradients are small integers, so that there are many ties and sums are exact.
func TestReference(t *testing.T) {
	const n, steps, seed = 60, 6, 1
	for _, pattern := range []string{sparsity.TopkA, sparsity.TopkA2, sparsity.Gtopk, sparsity.TopkSA} {
		for ranks := 1; ranks <= 6; ranks++ {
			for _, k := range []int{1, 7, 40, n} {
				label := fmt.Sprintf("%s, %d ranks, k = %d, seed %d", pattern, ranks, k, seed)
				rng := rand.New(rand.NewPCG(seed, uint64(1000*ranks+k)))
				var gradients [steps][][]float32 // of each rank
				for step := range gradients {
					for range ranks {
						g := make([]float32, n)
						for i := range g {
							g[i] = float32(max(0, rng.IntN(12)-4) * (1 - 2*rng.IntN(2)))
						}
						gradients[step] = append(gradients[step], g)
					}
				}
				want := reference{pattern: pattern, k: k}
				var results [steps][]float32
				var residuals [steps][][]float32
				for step, g := range gradients {
					results[step] = want.step(g)
					for _, r := range want.residuals {
						residuals[step] = append(residuals[step], slices.Clone(r))
					}
				}
				standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
					s, err := engine.New(rt, c, n, engine.Config{Pattern: pattern, Density: float64(k) / n})
					require.NoError(t, err)
					g, err := runtime.New(rt, dtype.F32, n)
					require.NoError(t, err)
					for step := range steps {
						require.NoError(t, errors.Join(runtime.CopyIn(g, gradients[step][c.Rank()]), s.AllReduce(ctx, g)))
						residual, err := s.Residual()
						require.NoError(t, err)
						result, err := cpu.Slice[float32](g)
						require.NoError(t, err)
						kept, err := cpu.Slice[float32](residual)
						require.NoError(t, err)
						assert.Equal(t, results[step], result, "%s, step %d", label, step)
						assert.Equal(t, residuals[step][c.Rank()], kept, "%s, step %d, residual of rank %d", label, step, c.Rank())
					}
					return errors.Join(s.Close(), g.Free())
				})
			}
		}
	}
}

// reference is all ranks of a pattern.
type reference struct {
	pattern   string
	k         int
	residuals [][]float32
}

// entry is one of a list.
type entry struct {
	index int
	value float32
}

// step makes a step and returns its result.
func (r *reference) step(gradients [][]float32) []float32 {
	n, share := len(gradients[0]), 1/float32(len(gradients))
	var selected [][]entry
	for rank, g := range gradients {
		if rank == len(r.residuals) {
			r.residuals = append(r.residuals, make([]float32, n))
		}
		residual := r.residuals[rank]
		all := make([]entry, n)
		for i := range g {
			residual[i] += g[i]
			all[i] = entry{i, residual[i]}
		}
		selected = append(selected, largest(all, r.k))
		for _, e := range selected[rank] {
			residual[e.index] = 0
		}
	}
	switch r.pattern {
	case sparsity.TopkA2:
		top := largest(sumOf(n, share, selected...), r.k)
		for rank, l := range selected {
			r.keep(rank, l, top)
		}
		selected, share = [][]entry{top}, 1
	case sparsity.Gtopk:
		for distance := 1; distance < len(selected); distance *= 2 {
			for rank := 0; rank+distance < len(selected); rank += 2 * distance {
				sum := sumOf(n, 1, selected[rank], selected[rank+distance])
				selected[rank] = largest(sum, r.k)
				r.keep(rank, sum, selected[rank])
			}
		}
		selected = selected[:1]
	case sparsity.TopkSA:
		selected = [][]entry{sumOf(n, 1, selected...)}
	}
	result := make([]float32, n)
	for _, e := range sumOf(n, share, selected...) {
		result[e.index] = e.value
	}
	return result
}

// keep adds what is in a list and not in another one to a rank's residual.
func (r *reference) keep(rank int, list, without []entry) {
	for _, e := range list {
		if !slices.ContainsFunc(without, func(o entry) bool { return o.index == e.index }) {
			r.residuals[rank][e.index] += e.value
		}
	}
}

// largest returns the k entries of largest magnitude, of equal ones the first.
func largest(list []entry, k int) []entry {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b entry) int { return cmp.Compare(max(b.value, -b.value), max(a.value, -a.value)) })
	list = list[:min(k, len(list))]
	slices.SortFunc(list, func(a, b entry) int { return a.index - b.index })
	return list
}

// sumOf adds lists up, each multiplied by a scale.
func sumOf(n int, scale float32, lists ...[]entry) (sum []entry) {
	values, there := make([]float32, n), make([]bool, n)
	for _, l := range lists {
		for _, e := range l {
			values[e.index] += float32(e.value * scale) // rounded before the sum
			there[e.index] = true
		}
	}
	for i, v := range values {
		if there[i] {
			sum = append(sum, entry{i, v})
		}
	}
	return sum
}

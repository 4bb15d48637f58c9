package base_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestSpans places parts of one array, step after step, some of which share memory, against a comparison of all pairs.
func TestSpans(t *testing.T) {
	const seed, length, steps = 7, 200, 300
	rng := rand.New(rand.NewPCG(seed, 0))
	rt := cpu.New()
	memory, err := cpu.Wrap(rt, make([]byte, length))
	require.NoError(t, err)
	for range 20 {
		n := rng.IntN(12)
		spans := base.NewSpans(n)
		from := make([]int, n)
		to := make([]int, n)
		for i := range n {
			from[i] = rng.IntN(length)
			to[i] = from[i] + rng.IntN(min(20, length-from[i]))
		}
		for step := range steps {
			spans.NextStep()
			var placed []int
			var tensors []*runtime.Tensor
			disjoint := true
			for _, i := range rng.Perm(n) {
				if rng.IntN(4) == 0 {
					continue // it is left out
				}
				if rng.IntN(3) == 0 { // it has moved
					from[i] = rng.IntN(length)
					to[i] = from[i] + rng.IntN(min(20, length-from[i]))
				}
				part, err := memory.Slice(0, from[i], to[i])
				require.NoError(t, err)
				tensors = append(tensors, part)
				var sharing []int
				for _, j := range placed {
					if from[i] < to[i] && from[j] < to[j] && from[i] < to[j] && from[j] < to[i] {
						sharing = append(sharing, j)
					}
				}
				other, err := spans.Place(i, part)
				require.NoError(t, err)
				if len(sharing) == 0 {
					require.Equal(t, -1, other, "seed %d, step %d, tensor %d", seed, step, i)
					placed = append(placed, i)
				} else {
					disjoint = false
					require.Contains(t, sharing, other, "seed %d, step %d, tensor %d", seed, step, i)
				}
			}
			if disjoint {
				assert.NoError(t, base.Disjoint("tensors", tensors))
			} else {
				assert.ErrorIs(t, base.Disjoint("tensors", tensors), comm.ErrArgument)
			}
		}
	}
}

// TestSpansAllocations: tensors that stay where they are cost nothing.
func TestSpansAllocations(t *testing.T) {
	rt := cpu.New()
	var tensors []*runtime.Tensor
	for range 100 {
		x, err := cpu.Wrap(rt, make([]float32, 5))
		require.NoError(t, err)
		tensors = append(tensors, x)
	}
	spans := base.NewSpans(len(tensors))
	assert.Zero(t, testing.AllocsPerRun(10, func() {
		spans.NextStep()
		for i, x := range tensors {
			other, err := spans.Place(i, x)
			if other >= 0 || err != nil {
				t.Error(other, err)
			}
		}
	}))
}

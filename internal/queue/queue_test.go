package queue_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/queue"
)

// A queue that elements pass through gives them in order, and does not grow.
func TestPassing(t *testing.T) {
	var q queue.Of[int]
	const behind = 3
	step := func(i int) {
		q.Push(i)
		if i >= behind {
			assert.Equal(t, i-behind, q.First())
			assert.Equal(t, []int{i - behind, i - behind + 1, i - behind + 2, i}, q.All())
			assert.Equal(t, i-behind, q.Pop())
		}
	}
	for i := range 100 {
		step(i)
	}
	assert.Zero(t, testing.AllocsPerRun(1000, func() { q.Push(0); q.Pop() }))
	for !q.Empty() {
		q.Pop()
	}
	assert.Empty(t, q.All())
}

// A queue for each key gives the elements of each in order, whatever those of others do.
func TestKeyed(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for _, keys := range []int{1, 3, 20, 1000} {
		var q queue.Keyed[int]
		want := map[uint64][]int{}
		for i := range 20_000 {
			key := uint64(rng.IntN(keys)) << (rng.IntN(2) * 40)
			first, ok := q.First(key)
			require.Equal(t, len(want[key]) > 0, ok)
			if ok {
				require.Equal(t, want[key][0], first)
			}
			if filling := i < 10_000; rng.IntN(3) == 0 != filling {
				q.Push(key, i)
				want[key] = append(want[key], i)
				continue
			}
			value, ok := q.Pop(key)
			require.Equal(t, len(want[key]) > 0, ok)
			if ok {
				require.Equal(t, want[key][0], value)
				want[key] = want[key][1:]
			}
		}
		var all []int
		for _, values := range want {
			all = append(all, values...)
		}
		require.ElementsMatch(t, all, slices.Collect(q.All))
		require.Equal(t, len(all) == 0, q.Empty())
	}
}

// Elements of many keys are taken in the opposite order in which they came, and of one key behind others, without a
// look at the others: a list would be searched 2^34 times.
func TestKeyedInAnotherOrder(t *testing.T) {
	const n = 1 << 17
	var q queue.Keyed[int]
	for i := range n {
		q.Push(uint64(i), i)
		q.Push(n, i)
	}
	for i := range n {
		q.Push(n+1, i)
	}
	for i := range n {
		value, ok := q.Pop(uint64(n - 1 - i))
		require.True(t, ok)
		require.Equal(t, n-1-i, value)
		value, ok = q.Pop(n + 1)
		require.True(t, ok)
		require.Equal(t, i, value)
	}
}

func TestKeyedKeepsItsMemory(t *testing.T) {
	var q queue.Keyed[*int]
	q.Push(7, nil)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		q.Push(8, nil)
		q.Push(8, nil)
		q.Pop(8)
		q.Pop(8)
	}))
}

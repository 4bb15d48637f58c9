package queue_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

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

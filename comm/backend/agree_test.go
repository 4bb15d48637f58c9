package backend_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
)

func TestSplitGroups(t *testing.T) {
	var splits []comm.Wait
	for _, x := range [][2]int{{7, 3}, {-1, 0}, {0, 5}, {7, -2}, {0, 5}, {7, 3}, {-3, 9}} {
		splits = append(splits, comm.Wait{Op: comm.OpSplit, Color: x[0], Key: x[1]})
	}
	assert.Equal(t, [][]int{{2, 4}, {3, 0, 5}}, backend.SplitGroups(splits))
	assert.Empty(t, backend.SplitGroups(splits[1:2]))
}

func TestAgree(t *testing.T) {
	same := func() []comm.Call {
		var calls []comm.Call
		for r := range 3 {
			counts := []int{4, 5, 6}
			calls = append(calls, comm.AllGatherVCall(uintptr(r), uintptr(r+9), counts, []int{0, r + 4, r + 9}, dtype.F32))
		}
		return calls
	}
	require.NoError(t, backend.Agree(same()))
	calls := same()
	calls[2].RecvCounts[1] = 7
	err := backend.Agree(calls)
	assert.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, "rank 0 passed counts[1] = 5, rank 2 passed 7")
	calls = same()
	calls[1] = comm.Call{Op: comm.OpBarrier}
	err = backend.Agree(calls)
	assert.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, "ranks 0, 2 called allgatherv of f32; rank 1 called barrier")
}

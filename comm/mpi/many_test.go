package mpi_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
)

// TestManyMessages has thousands of messages in flight, and tens of thousands with TUTTI_EXTENDED set.
func TestManyMessages(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) { l.mustRun(t, job{ranks: 2, test: "TestRankManyMessages"}) })
}

// TestRankManyMessages receives in another order than is sent.
func TestRankManyMessages(t *testing.T) {
	const tags = 7
	n := 5_000
	if extended {
		n = 20_000
	}
	r := newRank(t)
	send, _ := r.floats(n, func(i int) float32 { return float32(i) })
	recv, got := r.floats(n, func(int) float32 { return -1 })
	peer := 1 - r.world.Rank()
	for i := range n {
		require.NoError(t, r.world.Recv(at(recv, i), 1, dtype.F32, peer, uint32(i%tags)))
	}
	for i := range n {
		require.NoError(t, r.world.Send(at(send, i), 1, dtype.F32, peer, uint32(i%tags)))
	}
	r.sync()
	for i, x := range got {
		if x != float32(i) {
			assert.Equal(t, float32(i), x, "message %d", i)
			break
		}
	}
	require.NoError(t, r.world.Barrier(r.ctx))
}

func at(buf uintptr, i int) uintptr { return buf + uintptr(4*i) }

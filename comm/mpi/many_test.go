package mpi_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
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

// TestExhausted splits the world until the library has no room for more.
func TestExhausted(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		if l.name != "mpich" {
			t.Skip("its bound is too high to be reached")
		}
		if !extended {
			t.Skip("makes 2,048 communicators; set TUTTI_EXTENDED")
		}
		l.mustRun(t, job{ranks: 2, test: "TestRankExhausted", limit: 2 * time.Minute})
	})
}

// TestRankExhausted finds that the parent goes on, and that room comes back.
func TestRankExhausted(t *testing.T) {
	r := newRank(t)
	const bound = 2048 // of MPICH
	var children []comm.Communicator
	for {
		c, err := r.world.Split(r.ctx, 0, 0)
		if err != nil {
			require.ErrorIs(t, err, comm.ErrExhausted)
			require.NotErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorContains(t, err, "Too many communicators")
			break
		}
		children = append(children, c)
		require.Less(t, len(children), bound)
	}
	assert.Greater(t, len(children), bound-16, "one of MPI for each")
	require.NoError(t, r.world.Err())
	require.NoError(t, r.world.Barrier(r.ctx))
	_, err := r.world.Split(r.ctx, 0, 0)
	require.ErrorIs(t, err, comm.ErrExhausted)
	require.NoError(t, children[0].Barrier(r.ctx))
	for _, c := range children {
		require.NoError(t, c.Close())
	}
	require.Eventually(t, func() bool { // freed when all ranks have closed them
		require.NoError(t, r.world.Barrier(r.ctx))
		c, err := r.world.Split(r.ctx, 0, 0)
		if err != nil {
			require.ErrorIs(t, err, comm.ErrExhausted)
			return false
		}
		return assert.NoError(t, c.Close())
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, r.world.Barrier(r.ctx))
}

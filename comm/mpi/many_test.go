package mpi_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
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

// TestRankRefusedHead has the library refuse the receive of a head when many others wait: it says so.
func TestRankRefusedHead(t *testing.T) {
	r := newRank(t)
	c, err := r.world.Split(r.ctx, 0, 0)
	require.NoError(t, err)
	if c.Rank() == 0 {
		const count = 600 // more than a look asks about
		const bytes = 4096
		memory, err := r.rt.Allocate(count * bytes)
		require.NoError(t, err)
		for i := range count {
			require.NoError(t, c.Recv(memory+uintptr(i*bytes), bytes, dtype.U8, 0, 0))
		}
		restore := mpi.ReplaceIrecv(c, libc(t).Fail)
		err = c.Recv(memory, 0, dtype.U8, 1, 0)
		if err == nil {
			err = c.Sync(r.ctx)
		}
		restore()
		require.ErrorContains(t, err, "sysconf")
	}
	require.NoError(t, r.world.Barrier(r.ctx))
	require.NoError(t, c.Close())
}

// TestShuffledMessages receives messages one at a time, in another order than they were sent in.
func TestShuffledMessages(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		l.mustRun(t, job{ranks: 2, test: "TestRankShuffledMessages", env: withoutSharing})
	})
}

// TestRankShuffledMessages has rank 0 send messages whose data travels with their heads, or does not, with tags that
// the library has room for, or not. Messages of one tag come in order.
func TestRankShuffledMessages(t *testing.T) {
	const seed = 47
	const count = 300
	tags := []uint32{0, 7, 1 << 29, 1 << 31, math.MaxUint32}
	lengths := []int{0, 1, 512, 513, 20_000} // of floats
	type message struct {
		number int
		floats int
	}
	r := newRank(t)
	random := rand.New(rand.NewPCG(seed, 0)) // the same on both ranks
	sent := map[uint32][]message{}
	var order []uint32
	for i := range count {
		tag := tags[random.IntN(len(tags))]
		m := message{i, lengths[random.IntN(len(lengths))]}
		sent[tag] = append(sent[tag], m)
		order = append(order, tag)
		if r.world.Rank() == 0 {
			data, _ := r.floats(m.floats+1, func(int) float32 { return float32(m.number) })
			require.NoError(t, r.world.Send(data, m.floats, dtype.F32, 1, tag))
		}
	}
	random.Shuffle(count, func(i, j int) { order[i], order[j] = order[j], order[i] })
	for i, tag := range order {
		if r.world.Rank() == 0 {
			break
		}
		m := sent[tag][0]
		sent[tag] = sent[tag][1:]
		data, got := r.floats(m.floats+1, func(int) float32 { return -1 })
		require.NoError(t, r.world.Recv(data, m.floats, dtype.F32, 0, tag))
		if i%3 > 0 { // some wait together
			r.sync()
		}
		if i%3 == 0 {
			defer r.check(got, float32(m.number))
			continue
		}
		r.check(got, float32(m.number))
		require.NoError(t, r.rt.Deallocate(data))
	}
	r.sync()
	require.NoError(t, r.world.Barrier(r.ctx))
}

// check compares all floats but the last with a number, and the last with the value that nothing was written to.
func (r rank) check(got []float32, want float32) {
	r.t.Helper()
	last := len(got) - 1
	for i, x := range got {
		if i == last {
			want = -1
		}
		if x != want {
			r.t.Fatalf("float %d of %d: %v, want %v", i, last, x, want)
		}
	}
}

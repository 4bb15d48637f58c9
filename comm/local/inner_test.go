package local

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// tellingWorld makes two communicators whose small collectives go through cells,
// and a buffer for each: one element, rank+1.
func tellingWorld(t *testing.T) (comms []comm.Communicator, data [][]int32, addr []uintptr) {
	t.Helper()
	procs := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(max(procs, 2))
	t.Cleanup(func() { runtime.GOMAXPROCS(procs) })
	comms, err := New(2)
	require.NoError(t, err)
	for r, c := range comms {
		t.Cleanup(func() { _ = c.Close() })
		data = append(data, []int32{int32(r + 1)})
		addr = append(addr, hostmem.Addr(hostmem.Bytes(data[r])))
	}
	return comms, data, addr
}

// TestSleeperWhoseSmallCollectiveOthersFinish lets rank 0 sleep behind a message: it is
// rank 1 that tells rank 0's small collective then, and finishes it at once.
func TestSleeperWhoseSmallCollectiveOthersFinish(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	comms, data, addr := tellingWorld(t)
	_, messages, messageAddr := tellingWorld(t)
	c, peer, w := comms[0], comms[1], comms[0].(*communicator).e.world
	synced := make(chan error, 1)
	go func() {
		synced <- errors.Join(
			c.Recv(messageAddr[0], 1, dtype.I32, 1, 0),
			c.AllReduce(addr[0], addr[0], 1, dtype.I32, comm.Sum),
			c.Sync(ctx),
			c.Send(messageAddr[0], 1, dtype.I32, 1, 1),
			c.Sync(ctx))
	}()
	for w.sleepers.Load() == 0 && ctx.Err() == nil {
		runtime.Gosched()
	}
	require.NoError(t, peer.Group(
		comm.SendCall(messageAddr[1], 1, dtype.I32, 0, 0),
		comm.AllReduceCall(addr[1], addr[1], 1, dtype.I32, comm.Sum)))
	require.NoError(t, peer.Recv(messageAddr[1], 1, dtype.I32, 0, 1))
	require.NoError(t, peer.Sync(ctx))
	require.NoError(t, <-synced)
	for r := range comms {
		assert.Equal(t, []int32{3}, data[r])
		assert.Equal(t, []int32{2}, messages[r])
	}
}

// TestSmallLeavesBuffersOfWhoKnows lets rank 1, which has begun before the world broke,
// tell its part after rank 0 has heard of that: rank 0's result is not made any more.
func TestSmallLeavesBuffersOfWhoKnows(t *testing.T) {
	comms, data, addr := tellingWorld(t)
	require.NoError(t, comms[0].AllReduce(addr[0], addr[0], 1, dtype.I32, comm.Sum))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, comms[0].Sync(ctx), comm.ErrCanceled)
	call := comm.AllReduceCall(addr[1], addr[1], 1, dtype.I32, comm.Sum)
	x, e := newEntry(&call), comms[1].(*communicator).e
	e.mu.Lock()
	e.tell(&x)
	e.mu.Unlock()
	require.ErrorIs(t, comms[0].Sync(t.Context()), comm.ErrBroken)
	require.NoError(t, comms[0].Close())
	assert.Equal(t, []int32{1}, data[0])
	assert.Equal(t, []int32{3}, data[1], "rank 1 does not know yet")
}

// spelled plays a wait that ends after a time, or when it first lets others run if it shares a processor with them,
// on a machine where a look takes 10 ns.
func spelled(h *habit, until time.Duration, shares bool) (yields, sleeps int) {
	const look = 10 * time.Nanosecond
	var passed time.Duration
	clock := func() time.Time { return time.Unix(0, 0).Add(passed) }
	s := h.begin()
	for {
		if passed >= until {
			h.learn(&s)
			return yields, sleeps
		}
		switch s.next(clock) {
		case lookAgain:
			passed += look
		case letOthersRun:
			yields++
			passed += 20 * look
			if shares {
				until = passed
			}
		case goToSleep:
			sleeps++
			passed = until
			s.last = clock()
			h.learn(&s)
			return yields, sleeps
		}
	}
}

func newHabit() *habit {
	h := new(habit)
	h.slice.Store(int64(minSpin))
	h.total.Store(int64(minSpin))
	return h
}

// TestSpinOutgrowsWaking lets ranks wait for peers that slept and take 60 µs to wake up, which is what puts them to
// sleep as well: after some waits they spin for longer than that.
func TestSpinOutgrowsWaking(t *testing.T) {
	h := newHabit()
	_, sleeps := spelled(h, 60*time.Microsecond, false)
	assert.Equal(t, 1, sleeps)
	for range 10 {
		_, sleeps = spelled(h, 60*time.Microsecond, false)
	}
	assert.Zero(t, sleeps)
	for range 10 {
		spelled(h, 3*time.Microsecond, false)
	}
	yields, _ := spelled(h, 3*time.Microsecond, false)
	assert.Zero(t, yields, "nobody waits for this processor")
}

// TestSpinLeavesLongWaitsAlone: where waits take milliseconds, ranks spin for a microsecond.
func TestSpinLeavesLongWaitsAlone(t *testing.T) {
	h := newHabit()
	for range 10 {
		spelled(h, 3*time.Microsecond, false)
	}
	for range 10 {
		spelled(h, 2*time.Millisecond, false)
	}
	assert.EqualValues(t, minSpin, h.total.Load())
}

// TestSpinLetsPeersRun: where the peers share this rank's processor, as on a busy machine that leaves the process
// but one, a wait lets them run after a microsecond.
func TestSpinLetsPeersRun(t *testing.T) {
	h := newHabit()
	for range 10 {
		spelled(h, 3*time.Microsecond, false)
	}
	for range 10 {
		spelled(h, time.Second, true)
	}
	assert.EqualValues(t, minSpin, h.slice.Load())
}

// TestSpinEndsWithoutAClock: the clock of a bubble stands while a rank spins.
func TestSpinEndsWithoutAClock(t *testing.T) {
	h := newHabit()
	h.total.Store(int64(maxSpin))
	s := h.begin()
	for steps := 0; s.next(func() time.Time { return time.Unix(1, 0) }) != goToSleep; steps++ {
		require.Less(t, steps, 2*int(maxSpin/lookTime))
	}
}

// TestClaimHandsOutEachChunkOnce has goroutines take the chunks of one collective after the other.
func TestClaimHandsOutEachChunkOnce(t *testing.T) {
	const ranks = 9
	for seq, chunks := range []int{1, 2, 3, ranks, 10 * ranks, 1000, maxChunks} {
		var c claim
		c.offer(uint64(seq)+ringSize, chunks)
		var takers sync.WaitGroup
		taken := make([]atomic.Int32, chunks)
		for r := range ranks {
			takers.Go(func() {
				for c.available() {
					s, chunk, ok := c.take(r)
					assert.Equal(t, uint64(seq)+ringSize, s)
					if ok {
						taken[chunk].Add(1)
					}
				}
				_, _, ok := c.take(r) // of a rank that saw one and was late
				assert.False(t, ok)
			})
		}
		takers.Wait()
		for i := range taken {
			assert.EqualValues(t, 1, taken[i].Load(), "chunk %d of %d", i, chunks)
		}
	}
}

// TestLargerCollectivesHaveMoreChunks: the share of a rank that spins never gets smaller than what is worth taking,
// and never larger with a larger size, up to chunks that fill a cache.
func TestLargerCollectivesHaveMoreChunks(t *testing.T) {
	for _, ranks := range []int{1, 2, 3, 4, 8, 16} {
		for _, element := range []int{1, 2, 4, 8} {
			last := 0
			for bytes := 8; bytes <= 64<<20; bytes *= 2 {
				p := plan{size: element, block: blockBytes / element, total: bytes / element}
				p.cut(ranks, ranks, ranks, inlineLimit(ranks, true))
				assert.GreaterOrEqual(t, p.chunks, last, "%d ranks, %d bytes", ranks, bytes)
				assert.GreaterOrEqual(t, p.chunks*p.step, p.total)
				if traffic := bytes * 2 * ranks; p.chunks > 1 {
					assert.GreaterOrEqual(t, traffic/p.chunks, leastChunkTraffic/2, "%d ranks, %d bytes", ranks, bytes)
				}
				last = p.chunks
			}
			assert.GreaterOrEqual(t, last, ranks)
		}
	}
}

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
	clock := func() time.Duration { return passed }
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

// TestSpinRemembersLongWaits has short waits between long ones, of ranks that wait for the chunk of another: nobody
// waits for their processors.
func TestSpinRemembersLongWaits(t *testing.T) {
	h := newHabit()
	yields := 0
	for range 20 {
		for range 3 {
			spelled(h, 3*time.Microsecond, false)
		}
		yields, _ = spelled(h, 20*time.Microsecond, false)
	}
	assert.Zero(t, yields)
}

// firstErr is a context that does something when it is first asked for its error: a wait asks after it has looked in vain.
type firstErr struct {
	context.Context
	once sync.Once
	do   func()
}

// Err implements [context.Context].
func (c *firstErr) Err() error {
	c.once.Do(c.do)
	return c.Context.Err()
}

// TestWaitsForChunksAreLearned: a rank that waits for others, and then does the chunks of the collective that begins
// when these come, knows by its next wait that it has waited.
func TestWaitsForChunksAreLearned(t *testing.T) {
	const n = 1 << 16
	comms, _, _ := tellingWorld(t)
	long := [2][]int32{make([]int32, n), make([]int32, n)}
	call := func(r int) error {
		a := hostmem.Addr(hostmem.Bytes(long[r]))
		return comms[r].AllReduce(a, a, n, dtype.I32, comm.Sum)
	}
	h := &comms[0].(*communicator).e.habit
	const total = 64 * time.Microsecond // neither of the bounds, so that it changes by whatever is learned
	h.slice.Store(int64(maxSpin))
	h.total.Store(int64(total))
	ctx := &firstErr{Context: t.Context(), do: func() { assert.NoError(t, call(1)) }}
	require.NoError(t, call(0))
	require.NoError(t, comms[0].Sync(ctx))
	assert.EqualValues(t, 2*total, h.total.Load(), "a wait of no time")
	require.NoError(t, comms[1].Sync(t.Context()))
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
	for steps := 0; s.next(func() time.Duration { return time.Second }) != goToSleep; steps++ {
		require.Less(t, steps, 2*int(maxSpin/lookTime))
	}
}

// newClaim returns a claim with a range for each rank.
func newClaim(ranks int) *claim { return &claim{ranges: make([]chunkRange, ranks)} }

// TestClaimHandsOutEachChunkOnce has goroutines take the chunks of one offer after the other. Two try the offers before
// as well, as ranks do that were interrupted before they take.
func TestClaimHandsOutEachChunkOnce(t *testing.T) {
	const ranks = 9
	counts := []int{1, 2, 3, ranks - 1, ranks, 10 * ranks, 1000, 1, maxChunks, 2}
	c := newClaim(ranks)
	var before offer
	for seq, chunks := range counts {
		c.offer(uint64(seq), chunks)
		last := c.last()
		assert.EqualValues(t, seq, last.seq())
		var takers sync.WaitGroup
		taken := make([]atomic.Int32, chunks)
		for r := range ranks {
			takers.Go(func() {
				for more := true; more; {
					if r < 2 && seq > 0 {
						chunk, ok := c.take(before, r, ranks)
						assert.False(t, ok, "chunk %d of offer %d after offer %d", chunk, seq-1, seq)
					}
					chunk, ok := c.take(last, r, ranks)
					if ok {
						taken[chunk].Add(1)
					}
					more = ok
				}
			})
		}
		takers.Wait()
		for i := range taken {
			assert.EqualValues(t, 1, taken[i].Load(), "chunk %d of %d", i, chunks)
		}
		before = last
	}
}

// TestRanksTakeTheirRangesFirst: ranks that come together take chunks of ranges that do not meet, the same ones in each
// collective. The chunks of those that do not come are left to whoever has none any more.
func TestRanksTakeTheirRangesFirst(t *testing.T) {
	const ranks = 4
	const chunks = 8
	c := newClaim(ranks)
	for seq := range uint64(3) {
		c.offer(seq, chunks)
		taken := map[int][]int{}
		for range chunks / 2 { // of two ranks in turn
			for _, r := range []int{1, 2} {
				chunk, ok := c.take(c.last(), r, ranks)
				require.True(t, ok)
				taken[r] = append(taken[r], chunk)
			}
		}
		assert.Equal(t, map[int][]int{1: {2, 3, 6, 0}, 2: {4, 5, 7, 1}}, taken)
		for r := range ranks {
			_, ok := c.take(c.last(), r, ranks)
			assert.False(t, ok, "rank %d", r)
		}
	}
}

// TestRanksLeaveOtherRanges: a rank that looks in one range takes its own chunks, and none besides.
func TestRanksLeaveOtherRanges(t *testing.T) {
	const ranks = 3
	c := newClaim(ranks)
	c.offer(0, 2*ranks)
	for r := range ranks {
		for _, want := range []int{2 * r, 2*r + 1} {
			chunk, ok := c.take(c.last(), r, 1)
			assert.True(t, ok)
			assert.Equal(t, want, chunk)
		}
		_, ok := c.take(c.last(), r, 1)
		assert.False(t, ok, "rank %d", r)
	}
}

// TestChangesShareALine looks where the allocator has put a world: what each collective changes in its slot is one cache
// line, which is what travels between processors, and what waiting ranks look at is another.
func TestChangesShareALine(t *testing.T) {
	for _, ranks := range []int{1, 2, 16} {
		w := newWorld(ranks, dedicated)
		front := hostmem.AddrOf(&w.front.completed) / lineBytes
		assert.Equal(t, front, hostmem.AddrOf(&w.front.claim.offered)/lineBytes)
		assert.Equal(t, front, hostmem.AddrOf(&w.front.jobs)/lineBytes)
		for i := range w.slots {
			s := &w.slots[i]
			line := hostmem.AddrOf(&s.missing) / lineBytes
			assert.Equal(t, line, hostmem.AddrOf(&s.left)/lineBytes)
			assert.Equal(t, line, hostmem.AddrOf(&s.plan)/lineBytes)
			assert.Equal(t, line, hostmem.AddrOf(&s.plan.streaming)/lineBytes)
			assert.NotEqual(t, line, hostmem.AddrOf(&s.calls)/lineBytes)
			assert.NotEqual(t, line, (hostmem.AddrOf(&s.extras)+2*8)/lineBytes)
		}
	}
}

// TestCanceledBehindChunks cancels a rank that has not looked yet whether chunks are left of the collective before.
func TestCanceledBehindChunks(t *testing.T) {
	const n = 1 << 16
	comms, _, _ := tellingWorld(t)
	long := [2][]int32{make([]int32, n), make([]int32, n)}
	call := func(r int) error {
		a := hostmem.Addr(hostmem.Bytes(long[r]))
		return comms[r].AllReduce(a, a, n, dtype.I32, comm.Sum)
	}
	require.NoError(t, call(0))
	require.NoError(t, call(1))
	require.NoError(t, comms[0].Sync(t.Context()))
	e := comms[0].(*communicator).e
	require.True(t, e.mayHelp(), "rank 0, which has done the last chunk, does not know that")
	require.NoError(t, call(0))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ended := make(chan error, 1)
	go func() { ended <- comms[0].Sync(ctx) }()
	select {
	case err := <-ended:
		require.ErrorIs(t, err, comm.ErrCanceled)
	case <-time.After(time.Minute):
		require.Fail(t, "rank 0 waits on")
	}
}

// TestOneRankTakesAll: the ranks of a world that has more of them than ranges come in any order, and one may do
// everything.
func TestOneRankTakesAll(t *testing.T) {
	for _, ranges := range []int{1, 2, 3, 8} {
		for rank := range 2 * ranges {
			c := newClaim(ranges)
			c.offer(0, 5)
			var taken []int
			for chunk, ok := c.take(c.last(), rank, ranges); ok; chunk, ok = c.take(c.last(), rank, ranges) {
				taken = append(taken, chunk)
			}
			assert.ElementsMatch(t, []int{0, 1, 2, 3, 4}, taken, "rank %d, %d ranges", rank, ranges)
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
				p := plan{size: element, total: bytes / element}
				p.cut(ranks, ranks, blockBytes/element, ranks, inlineLimit(ranks, true))
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

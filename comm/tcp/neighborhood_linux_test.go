package tcp

import (
	goruntime "runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/segment"
)

// newNeighborhood returns what a rank without others shares, and the word of its bell. Nobody listens yet.
func newNeighborhood() (s *neighborhood, word *atomic.Uint32) {
	memory := make([]uint64, segment.BellBytes/8)
	address := hostmem.Addr(memory)
	n := &node{size: 1, stop: make(chan struct{}), wires: map[uint64]*wire{}}
	n.pairs = []*pair{newPair(n, 0)}
	s = &neighborhood{
		node:  n,
		ranks: []int{0},
		bells: []segment.Bell{segment.NewBell(address)},
		kick:  make(chan struct{}, 1),
		ended: make(chan struct{}),
	}
	n.neighbors.Store(s)
	return s, &hostmem.Slice[atomic.Uint32](address, 1)[0]
}

// await yields until a word has a value.
func await(word *atomic.Uint32, value uint32) {
	for word.Load() != value {
		time.Sleep(time.Microsecond)
	}
}

// A wait that is about to sleep while its node ends does not keep the end from listen.
func TestDozeBesideClose(t *testing.T) {
	const quiet, armed = 0, 1
	for range 20 {
		s, word := newNeighborhood()
		s.mu.Lock() // listen looks, and gets no further
		go s.listen()
		await(word, armed)
		close(s.node.stop)
		closed := make(chan struct{})
		go func() {
			s.close()
			close(closed)
		}()
		await(word, quiet)
		s.doze()
		s.mu.Unlock()
		select {
		case <-closed:
		case <-time.After(time.Minute):
			require.FailNow(t, "listen sleeps on")
		}
	}
}

// newTwins returns a communicator on two ranks of one machine, whose neighborhoods are s.
func newTwins(t *testing.T, id uint64, s [2]*neighborhood) (twins [2]*endpoint) {
	const size = 2
	memory := make([]uint64, schedule.SegmentBytes(size)/8+1)
	slots := hostmem.Slice[byte](hostmem.Addr(memory), schedule.SegmentBytes(size))
	t.Cleanup(func() { goruntime.KeepAlive(memory) })
	for rank := range size {
		w := s[rank].node.newWire(id, rank, []int{0, 0})
		check := backend.Check{Backend: name, Rank: rank, WorldSize: size}
		w.engine = schedule.New(schedule.Config{Check: check, Wire: w, MaxTag: 1 << 62})
		require.NoError(t, s[rank].node.register(w))
		twins[rank] = &endpoint{Engine: w.engine, wire: w}
		twins[rank].useSlots(slots, func() {})
	}
	return twins
}

// woken counts the communicators that a look at the neighborhood wakes.
func woken(s *neighborhood) (count int) {
	for _, w := range s.node.wires {
		drain(w)
	}
	s.look()
	for _, w := range s.node.wires {
		if drain(w) {
			count++
		}
	}
	return count
}

// drain empties the channels of a wire, and reports whether there was anything for waits.
func drain(w *wire) (awaits bool) {
	select {
	case <-w.awaits:
		awaits = true
	default:
	}
	select {
	case <-w.drives:
	default:
	}
	return awaits
}

// A look wakes the communicators with a call in flight, however many others are open.
func TestLookWakesWhoWaits(t *testing.T) {
	var s [2]*neighborhood
	for rank := range s {
		s[rank], _ = newNeighborhood()
	}
	var all [][2]*endpoint
	for id := range uint64(100) {
		all = append(all, newTwins(t, id, s))
	}
	memory := make([]float32, 2)
	call := func(rank int, e *endpoint) {
		p := hostmem.Addr(memory[rank:])
		require.NoError(t, e.Submit(comm.AllReduceCall(p, p, 1, dtype.F32, comm.Sum)))
	}
	assert.Zero(t, woken(s[0]), "nothing has been called")
	for round := range 3 {
		pair := all[round*7]
		memory[0] = 1
		memory[1] = 2
		call(0, pair[0])
		for range 3 {
			assert.Equal(t, 1, woken(s[0]), "one waits for rank 1")
			assert.Zero(t, woken(s[1]), "rank 1 has not called")
		}
		call(1, pair[1])
		assert.Equal(t, 1, woken(s[0]), "its peer has come")
		pair[0].Drive()
		pair[1].Drive()
		assert.Equal(t, []float32{3, 3}, memory)
		for rank := range s {
			assert.Zero(t, woken(s[rank]), "all are idle")
			assert.Empty(t, s[rank].watched)
		}
	}
	call(0, all[0][0])
	s[0].unwatch(all[0][0].wire)
	assert.Zero(t, woken(s[0]), "it is closed")
}

// A wait that sleeps stays asleep beside one of another communicator, which looks by itself and mutes the bell.
func TestDozeBesidePolls(t *testing.T) {
	const long = 5 * time.Millisecond
	s, _ := newNeighborhood()
	w := s.node.newWire(1, 0, []int{0})
	w.shares.Store(true)
	other := s.node.newWire(2, 0, []int{0})
	other.shares.Store(true)
	for range 3 {
		require.True(t, other.Looks(false))
		began := time.Now()
		w.Await(long)
		require.GreaterOrEqual(t, time.Since(began), long)
	}
}

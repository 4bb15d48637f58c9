package tcp

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
		s.node.mu.Lock() // listen looks, and gets no further
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
		s.node.mu.Unlock()
		select {
		case <-closed:
		case <-time.After(time.Minute):
			require.FailNow(t, "listen sleeps on")
		}
	}
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

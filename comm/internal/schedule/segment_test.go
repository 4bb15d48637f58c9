package schedule

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// newSegments returns the segments of a number of ranks over memory of the Go heap, where
// the race detector looks.
func newSegments(size, capacity int) []*segment {
	segments := make([]*segment, size)
	for r := range segments {
		segments[r] = &segment{rank: r, size: size, capacity: capacity}
		if r == 0 {
			segments[0].memory = hostmem.Bytes(make([]uint64, segments[0].bytes()/8+1))
		}
		segments[r].memory = segments[0].memory
		segments[r].lay()
	}
	return segments
}

// TestSegmentRounds has ranks read in every round the data of all ranks in that round, some
// sooner and some later.
func TestSegmentRounds(t *testing.T) {
	const size, capacity, rounds = 3, 300, 4000
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	lengths := make([]int, rounds)
	random := rand.New(rand.NewPCG(seed, 0))
	for i := range lengths {
		lengths[i] = random.IntN(capacity + 1)
	}
	value := func(rank, round, i int) byte { return byte(7*rank + 31*round + i) }
	var ranks sync.WaitGroup
	for r, s := range newSegments(size, capacity) {
		ranks.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(r)+1))
			own := make([]byte, capacity)
			o := &Op{plan: plan{send: hostmem.Addr(own)}}
			for round, n := range lengths {
				for i := range n {
					own[i] = value(r, round, i)
				}
				o.round.maxBytes, o.round.fingerprint = n, uint64(round)*0x9e3779b97f4a7c15
				for range random.IntN(3) {
					runtime.Gosched()
				}
				s.begin(o, n)
				for o.inFlight > 0 {
					if s.await(1) == nil {
						runtime.Gosched()
					}
				}
				for q := range size {
					for i, x := range hostmem.Slice[byte](s.data(q, n), n) {
						if x != value(q, round, i) {
							t.Errorf("rank %d, round %d: byte %d of %d of rank %d is %d, want %d", r, round, i, n, q, x, value(q, round, i))
							return
						}
					}
				}
			}
			runtime.KeepAlive(own)
		})
	}
	ranks.Wait()
}

// TestSegmentDisagreement has ranks that have called different things wait for each other.
func TestSegmentDisagreement(t *testing.T) {
	segments := newSegments(2, 64)
	a, s := &Op{plan: plan{round: sharedRound{fingerprint: 1 << 40}}}, &Op{plan: plan{round: sharedRound{fingerprint: 2 << 40}}}
	segments[0].begin(a, 0)
	segments[1].begin(s, 0)
	assert.Nil(t, segments[0].await(10))
	assert.Nil(t, segments[1].await(10))
	assert.True(t, segments[0].hasBegun(0))
	assert.False(t, segments[0].hasBegun(1))

	last := func() [2]uint64 {
		state, passed := segments[0].last(1)
		return [2]uint64{state, passed}
	}
	assert.Equal(t, [2]uint64{lastUnwritten, 0}, last())
	segments[1].setLast(lastInFlight, 7)
	assert.Equal(t, [2]uint64{lastInFlight, 7}, last())
	segments[1].setLast(lastUnsent, 7)
	assert.Equal(t, [2]uint64{lastUnsent, 7}, last())
}

// deaf is a wire that takes no control message.
type deaf struct{ Wire }

func (deaf) Tell(int, bool, []byte) bool { return false }
func (deaf) Gone(int) error              { return nil }
func (deaf) Looks(bool) bool             { return false }
func (deaf) Moved() bool                 { return false }

// TestUntoldGoodbye has a rank leave behind another one, whose goodbye it has not heard: a third one is not to take the
// goodbye that only that one did not get for an abort. Where nobody says that a rank is gone, it is to.
func TestUntoldGoodbye(t *testing.T) {
	for _, looker := range []Looker{deaf{}, nil} {
		s := newSegments(2, 64)[0]
		e := &Engine{rank: 0, size: 2, wire: deaf{}, looker: looker, segment: *s, peers: make([]peer, 2)}
		e.notifyAll(controlMessage{kind: goodbye})
		state, _ := s.last(0)
		assert.Equal(t, looker == nil, state == lastUnsent)
	}
}

// TestNoSegment is what an engine has whose ranks share nothing.
func TestNoSegment(t *testing.T) {
	var s segment
	assert.False(t, s.fits(0))
	state, _ := s.last(0)
	assert.EqualValues(t, lastUnwritten, state)
	s.setLast(lastInFlight, 1)
	assert.Nil(t, s.await(1))
}

// TestSlots looks at the addresses of slots: they are apart, and short data is beside the
// flag.
func TestSlots(t *testing.T) {
	s := newSegments(3, 100)[0]
	last := uintptr(0)
	for round := range uint64(2) {
		s.round = round
		for r := range 3 {
			at := s.now()[r].address
			if last > 0 {
				require.GreaterOrEqual(t, at, last)
			}
			assert.Equal(t, at+8, s.data(r, 56))
			assert.Equal(t, at+64, s.data(r, 57))
			last = s.data(r, 100) + 100
		}
	}
	assert.LessOrEqual(t, last, hostmem.Addr(s.memory)+uintptr(s.slotsBytes()))
}

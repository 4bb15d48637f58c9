package mpi

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

// newBoards returns the boards of a number of ranks over memory of the Go heap, where
// the race detector looks.
func newBoards(size, capacity int) []*board {
	boards := make([]*board, size)
	for r := range boards {
		boards[r] = &board{rank: r, size: size, capacity: capacity}
		if r == 0 {
			boards[0].memory = hostmem.Bytes(make([]uint64, boards[0].bytes()/8+1))
		}
		boards[r].memory = boards[0].memory
		boards[r].lay()
	}
	return boards
}

// TestBoardRounds has ranks read in every round what all have told in that round, some
// sooner and some later.
func TestBoardRounds(t *testing.T) {
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
	for r, b := range newBoards(size, capacity) {
		ranks.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(r)+1))
			own := make([]byte, capacity)
			o := &op{plan: plan{send: hostmem.Addr(own)}}
			for round, n := range lengths {
				for i := range n {
					own[i] = value(r, round, i)
				}
				o.most, o.chain = n, uint64(round)*0x9e3779b97f4a7c15
				for range random.IntN(3) {
					runtime.Gosched()
				}
				b.tell(o, n)
				for o.pending > 0 {
					if b.await(1) == nil {
						runtime.Gosched()
					}
				}
				for q := range size {
					for i, x := range hostmem.Slice[byte](b.data(q, n), n) {
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

// TestBoardDisagreement has ranks that have called different things wait for each other.
func TestBoardDisagreement(t *testing.T) {
	boards := newBoards(2, 64)
	a, b := &op{plan: plan{chain: 1 << 40}}, &op{plan: plan{chain: 2 << 40}}
	boards[0].tell(a, 0)
	boards[1].tell(b, 0)
	assert.Nil(t, boards[0].await(10))
	assert.Nil(t, boards[1].await(10))
	assert.True(t, boards[0].hasTold(0))
	assert.False(t, boards[0].hasTold(1))

	parted := func() [2]uint64 {
		how, passed := boards[0].parted(1)
		return [2]uint64{how, passed}
	}
	assert.Equal(t, [2]uint64{lastUnwritten, 0}, parted())
	boards[1].part(lastUnderWay, 7)
	assert.Equal(t, [2]uint64{lastUnderWay, 7}, parted())
	boards[1].part(lastUnsent, 7)
	assert.Equal(t, [2]uint64{lastUnsent, 7}, parted())
}

// TestNoBoard is what an endpoint has whose ranks share nothing.
func TestNoBoard(t *testing.T) {
	var b board
	assert.False(t, b.fits(0))
	how, _ := b.parted(0)
	assert.EqualValues(t, lastUnwritten, how)
	b.part(lastUnderWay, 1)
	assert.Nil(t, b.await(1))
	b.release()
}

// TestPages looks at where pages lie: apart, and with the data beside the stamp if it is
// short.
func TestPages(t *testing.T) {
	b := newBoards(3, 100)[0]
	last := uintptr(0)
	for round := range uint64(2) {
		b.round = round
		for r := range 3 {
			at := b.now()[r].address
			if last > 0 {
				require.GreaterOrEqual(t, at, last)
			}
			assert.Equal(t, at+8, b.data(r, 56))
			assert.Equal(t, at+64, b.data(r, 57))
			last = b.data(r, 100) + 100
		}
	}
	assert.LessOrEqual(t, last, hostmem.Addr(b.memory)+uintptr(b.pagesBytes()))
}

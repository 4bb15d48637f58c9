package tcp

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
)

// Ranks propose numbers from several goroutines. No two are the same, none is the world's, and each is only for the
// rank that proposes it.
func TestProposals(t *testing.T) {
	for _, size := range []int{1, 2, 3, 64} {
		var mu sync.Mutex
		var all sync.WaitGroup
		ranks := map[uint64]int{worldID: -1}
		for rank := range size {
			n := &node{rank: rank, size: size}
			for range 4 {
				all.Go(func() {
					for range 100 {
						number := n.propose()
						mu.Lock()
						_, taken := ranks[number]
						ranks[number] = rank
						mu.Unlock()
						if taken {
							assert.Fail(t, "a number twice", "%d of rank %d", number, rank)
						}
					}
				})
			}
		}
		all.Wait()
		n := &node{size: size}
		for number, rank := range ranks {
			for other := range size {
				if other != rank && size > 8 && uint64(other%8) != number/uint64(size)%8 {
					continue // each number is tried as one of an eighth of the ranks
				}
				err := n.checkProposal(number, other)
				valid := rank == other && err == nil || rank != other && errors.Is(err, comm.ErrMismatch)
				if !valid { // as many assertions take seconds
					assert.Fail(t, "a proposal", "%d of rank %d as one of rank %d: %v", number, rank, other, err)
				}
			}
		}
	}
}

// A number that is in use is refused, and a communicator that closes frees only its own number.
func TestRegister(t *testing.T) {
	n := &node{size: 2, wires: map[uint64]*wire{}}
	n.pairs = []*pair{newPair(n, 0), newPair(n, 1)}
	all := []int{0, 1}
	first, second, other := n.newWire(5, 0, all), n.newWire(5, 0, all), n.newWire(7, 0, all)
	require.NoError(t, n.register(first))
	require.NoError(t, n.register(other))
	require.ErrorIs(t, n.register(second), comm.ErrMismatch)
	n.unregister(second)
	assert.Same(t, first, n.wire(5))
	n.unregister(first)
	assert.Nil(t, n.wire(5))
	assert.Same(t, other, n.wire(7))
	n.gone = true
	assert.ErrorIs(t, n.register(second), comm.ErrClosed)
}

package local

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// dedicatedWorld makes communicators that are closed when the test ends, each of which has a processor, they think.
func dedicatedWorld(t *testing.T, ranks int) []comm.Communicator {
	comms := NewDedicated(ranks)
	t.Cleanup(func() {
		for _, c := range comms {
			assert.NoError(t, c.Close())
		}
	})
	return comms
}

// TestPartsAreTheWhole compares sums that are made in parts with those that one goroutine makes of all operands, in rank
// order, bit by bit. The ranks do the same collectives one after the other, in place and not, some without waiting, and
// now and then one of them comes late.
func TestPartsAreTheWhole(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for _, ranks := range []int{2, 3, 5, 8, 16} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			comms := dedicatedWorld(t, ranks)
			random := rand.New(rand.NewPCG(seed, uint64(ranks)))
			limit := comms[0].(*communicator).e.world.small / 4
			counts := []int{0, 1, 5, 6, 7, 16, 17, limit - 1, limit, limit + 1}
			for range 40 {
				counts = append(counts, random.IntN(limit)+1)
			}
			want := make([][]float32, len(counts))
			for round, count := range counts {
				want[round] = sums(seed, round, count, ranks)
			}
			var group sync.WaitGroup
			for r, c := range comms {
				group.Go(func() {
					memory := make([]float32, 2*(limit+1))
					address := hostmem.Addr(memory)
					for round, count := range counts {
						copy(memory, operand(seed, round, r, count))
						recv := address
						if round%3 > 0 {
							recv += uintptr(4 * count)
						}
						if round%ranks == r && round%2 > 0 {
							time.Sleep(50 * time.Microsecond)
						}
						assert.NoError(t, c.AllReduce(address, recv, count, dtype.F32, comm.Sum))
						if round%5 == 0 {
							assert.NoError(t, c.Barrier(ctx))
						}
						if !assert.NoError(t, c.Sync(ctx)) {
							return
						}
						for i, x := range hostmem.Slice[float32](recv, count) {
							if math.Float32bits(x) != math.Float32bits(want[round][i]) {
								t.Errorf("rank %d, round %d: element %d of %d is %v, want %v", r, round, i, count, x, want[round][i])
								return
							}
						}
					}
				})
			}
			group.Wait()
		})
	}
}

// operand is what a rank contributes to a round.
func operand(seed uint64, round, rank, count int) []float32 {
	random := rand.New(rand.NewPCG(seed, uint64(round*cellRanks+rank)))
	data := make([]float32, count)
	for i := range data {
		data[i] = float32(random.NormFloat64())
	}
	return data
}

// sums adds the ranks' operands of a round in rank order.
func sums(seed uint64, round, count, ranks int) []float32 {
	total := operand(seed, round, 0, count)
	for r := 1; r < ranks; r++ {
		for i, x := range operand(seed, round, r, count) {
			total[i] += x
		}
	}
	return total
}

// TestPartsOfWhoDoesNotWait has one rank call and then wait for the others by other means than Sync: they make its part.
func TestPartsOfWhoDoesNotWait(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const ranks = 4
	comms := dedicatedWorld(t, ranks)
	count := comms[0].(*communicator).e.world.small / 4
	require.Positive(t, partLength(ranks, 4*count))
	data := make([][]int32, ranks)
	call := func(r int) error {
		address := hostmem.Addr(hostmem.Bytes(data[r]))
		return comms[r].AllReduce(address, address, count, dtype.I32, comm.Sum)
	}
	for r := range data {
		data[r] = make([]int32, count)
		for i := range data[r] {
			data[r][i] = int32(r + i)
		}
	}
	require.NoError(t, call(0))
	var group sync.WaitGroup
	for r := 1; r < ranks; r++ {
		group.Go(func() {
			assert.NoError(t, call(r))
			assert.NoError(t, comms[r].Sync(ctx))
		})
	}
	group.Wait()
	require.NoError(t, comms[0].Sync(ctx))
	for r := range data {
		for i, x := range data[r] {
			require.EqualValues(t, 6+4*i, x, "rank %d, element %d", r, i)
		}
	}
}

// TestPartsCoverTheResult: parts follow each other, end with the result and fit in their place.
func TestPartsCoverTheResult(t *testing.T) {
	for ranks := 2; ranks <= cellRanks; ranks++ {
		for bytes := 4; bytes <= smallBytes(ranks, true); bytes += 52 {
			length := partLength(ranks, bytes)
			if length == 0 {
				continue
			}
			require.LessOrEqual(t, length, partLength(ranks, smallBytes(ranks, true)))
			x := &entry{count: bytes / 4, dt: dtype.F32}
			elements := 0
			for r := range ranks {
				offset, count := partOf(x, r, length)
				if count > 0 {
					require.EqualValues(t, 4*elements, offset)
				}
				elements += count
			}
			require.Equal(t, x.count, elements, "%d ranks, %d bytes", ranks, bytes)
		}
	}
}

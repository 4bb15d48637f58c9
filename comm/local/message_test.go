package local_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// sizes of messages: none, small, and long enough to be copied in chunks.
var messageSizes = []int{0, 1, 1000, 1 << 18}

// TestBothSendFirst exchanges without a group, which other backends need not
// allow.
func TestBothSendFirst(t *testing.T) {
	for _, n := range messageSizes {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			ctx := within(t)
			m := newMemory(t)
			_, out := perRank(m, 2, n, rankPlusOne)
			in, inAt := perRank(m, 2, n, constant(0))
			requireAll(t, onAll(world(t, 2), func(c comm.Communicator) error {
				r := c.Rank()
				if err := c.Send(out[r], n, dtype.I32, 1-r, 7); err != nil {
					return err
				}
				if err := c.Recv(inAt[r], n, dtype.I32, 1-r, 7); err != nil {
					return err
				}
				return c.Sync(ctx)
			}))
			for r := range in {
				requireFilled(t, in[r], n, int32(2-r))
			}
		})
	}
}

// TestTags receives in another order than the order of sending.
func TestTags(t *testing.T) {
	const count = 50
	ctx := within(t)
	comms := world(t, 2)
	_, out := perRank(newMemory(t), count, 1, func(i, _ int) int32 { return int32(i) })
	in, inAt := perRank(newMemory(t), count, 1, constant(-1))
	for i := range count {
		require.NoError(t, comms[0].Send(out[i], 1, dtype.I32, 1, uint32(i/2))) // two per tag
	}
	for k := range count / 2 {
		tag := count/2 - 1 - k
		require.NoError(t, comms[1].Recv(inAt[2*tag], 1, dtype.I32, 0, uint32(tag)))
		require.NoError(t, comms[1].Recv(inAt[2*tag+1], 1, dtype.I32, 0, uint32(tag)))
	}
	requireAll(t, onAll(comms, func(c comm.Communicator) error { return c.Sync(ctx) }))
	for i := range in {
		require.Equal(t, int32(i), in[i][0], "message %d of tag %d", i%2, i/2)
	}
}

// TestForwarding passes a value along the ranks through one buffer each, and
// reduces it, without a Sync: every operation must wait for the one before.
func TestForwarding(t *testing.T) {
	for _, n := range messageSizes[1:] {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			const ranks, rounds = 4, 10
			ctx := within(t)
			data, addr := perRank(newMemory(t), ranks, n, func(r, _ int) int32 { return int32(min(1, max(0, 1-r))) })
			requireAll(t, onAll(world(t, ranks), func(c comm.Communicator) error {
				r, a := c.Rank(), addr[c.Rank()]
				for range rounds {
					if r > 0 {
						if err := c.Recv(a, n, dtype.I32, r-1, 0); err != nil {
							return err
						}
					}
					if r < ranks-1 {
						if err := c.Send(a, n, dtype.I32, r+1, 0); err != nil {
							return err
						}
					}
					if err := c.AllReduce(a, a, n, dtype.I32, comm.Sum); err != nil {
						return err
					}
				}
				return c.Sync(ctx)
			}))
			want := int32(1)
			for range rounds {
				want *= ranks
			}
			for r := range data {
				requireFilled(t, data[r], n, want, "rank %d", r)
			}
		})
	}
}

// TestSendToOneself sends before and after receiving.
func TestSendToOneself(t *testing.T) {
	ctx := within(t)
	c := world(t, 2)[1]
	_, out := perRank(newMemory(t), 2, 3, rankPlusOne)
	in, inAt := perRank(newMemory(t), 2, 3, constant(0))
	require.NoError(t, c.Send(out[0], 3, dtype.I32, 1, 1))
	require.NoError(t, c.Recv(inAt[1], 3, dtype.I32, 1, 2))
	require.NoError(t, c.Recv(inAt[0], 3, dtype.I32, 1, 1))
	require.NoError(t, c.Send(out[1], 3, dtype.I32, 1, 2))
	require.NoError(t, c.Sync(ctx))
	require.Equal(t, []int32{1, 1, 1}, in[0])
	require.Equal(t, []int32{2, 2, 2}, in[1])
}

// TestLateMessages keeps a collective back until the messages before it are
// done, while other ranks have already come to it.
func TestLateMessages(t *testing.T) {
	ctx := within(t)
	comms := world(t, 3)
	data, addr := perRank(newMemory(t), 3, 1, constant(1))
	five, fiveAt := perRank(newMemory(t), 1, 1, constant(5))
	require.NoError(t, comms[0].Recv(addr[0], 1, dtype.I32, 2, 0))
	for r := range 2 {
		require.NoError(t, comms[r].AllReduce(addr[r], addr[r], 1, dtype.I32, comm.Sum))
	}
	require.NoError(t, comms[2].Send(fiveAt[0], 1, dtype.I32, 0, 0))
	require.NoError(t, comms[2].AllReduce(addr[2], addr[2], 1, dtype.I32, comm.Sum))
	requireAll(t, onAll(comms, func(c comm.Communicator) error { return c.Sync(ctx) }))
	for r := range data {
		require.Equal(t, int32(7), data[r][0])
	}
	require.Equal(t, int32(5), five[0][0])
}

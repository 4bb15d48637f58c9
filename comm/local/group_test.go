package local_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

var errTest = errors.New("test")

// TestGroupStartsTogether mixes messages and collectives in groups, in orders
// that would deadlock one after the other.
func TestGroupStartsTogether(t *testing.T) {
	ctx := within(t)
	m := newMemory(t)
	sum, sumAt := perRank(m, 2, 4, rankPlusOne)
	_, out := perRank(m, 2, 4, rankPlusOne)
	in, inAt := perRank(m, 2, 4, constant(0))
	requireAll(t, onAll(world(t, 2), func(c comm.Communicator) error {
		r := c.Rank()
		calls := []comm.Call{
			comm.AllReduceCall(sumAt[r], sumAt[r], 4, dtype.I32, comm.Sum),
			comm.SendCall(out[r], 4, dtype.I32, 1-r, 0),
			comm.RecvCall(inAt[r], 4, dtype.I32, 1-r, 0),
		}
		if r == 1 {
			slices.Reverse(calls)
		}
		return errors.Join(c.Group(calls...), c.Sync(ctx))
	}))
	for r := range 2 {
		requireFilled(t, sum[r], 4, 3)
		requireFilled(t, in[r], 4, int32(2-r))
	}
}

// TestLargeGroup submits more collectives at once than the ring has slots.
func TestLargeGroup(t *testing.T) {
	const ranks, calls = 3, 1000
	ctx := within(t)
	data, addr := perRank(newMemory(t), ranks, calls, rankPlusOne)
	requireAll(t, onAll(world(t, ranks), func(c comm.Communicator) error {
		var group []comm.Call
		for i := range calls {
			a := at(addr[c.Rank()], i)
			group = append(group, comm.AllReduceCall(a, a, 1, dtype.I32, comm.Sum))
		}
		return errors.Join(c.Group(group...), c.Sync(ctx))
	}))
	for r := range ranks {
		requireFilled(t, data[r], calls, 6)
	}
}

// TestGroupErrors checks that an error in a group submits nothing of it, and
// leaves the communicator usable.
func TestGroupErrors(t *testing.T) {
	ctx := within(t)
	c := world(t, 1)[0]
	data, addr := perRank(newMemory(t), 2, 8, rankPlusOne)
	copyAll := comm.AllReduceCall(addr[0], addr[1], 8, dtype.I32, comm.Sum)
	for name, bad := range map[string][]comm.Call{
		"of a call": {comm.BroadcastCall(addr[0], -1, dtype.I32, 0)},
		"overlapping messages": {
			comm.SendCall(addr[0], 8, dtype.I32, 0, 0), comm.RecvCall(at(addr[0], 7), 8, dtype.I32, 0, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, c.Group(append(bad, copyAll)...), comm.ErrArgument)
			require.NoError(t, c.Sync(ctx))
			requireFilled(t, data[1], 8, 2, "was submitted")
		})
	}
	require.NoError(t, c.Group(copyAll))
	require.NoError(t, c.Sync(ctx))
	require.Equal(t, data[0], data[1])
}

// TestEmptyMessagesOverlapNothing groups messages without elements, which point
// into the buffer of another.
func TestEmptyMessagesOverlapNothing(t *testing.T) {
	ctx := within(t)
	c := world(t, 1)[0]
	data, addr := perRank(newMemory(t), 2, 8, rankPlusOne)
	require.NoError(t, c.Group(
		comm.RecvCall(addr[1], 8, dtype.I32, 0, 0), comm.SendCall(at(addr[1], 4), 0, dtype.I32, 0, 1),
		comm.RecvCall(at(addr[1], 3), 0, dtype.I32, 0, 1), comm.SendCall(addr[0], 8, dtype.I32, 0, 0)))
	require.NoError(t, c.Sync(ctx))
	requireFilled(t, data[1], 8, 1)
}

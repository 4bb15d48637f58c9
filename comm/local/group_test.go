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
		calls := []func() error{
			func() error { return c.AllReduce(sumAt[r], sumAt[r], 4, dtype.I32, comm.Sum) },
			func() error { return c.Send(out[r], 4, dtype.I32, 1-r, 0) },
			func() error { return c.Recv(inAt[r], 4, dtype.I32, 1-r, 0) },
		}
		if r == 1 {
			slices.Reverse(calls)
		}
		err := c.Group(func() error {
			for _, call := range calls {
				if err := call(); err != nil {
					return err
				}
			}
			return nil
		})
		return errors.Join(err, c.Sync(ctx))
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
		err := c.Group(func() error {
			for i := range calls {
				a := at(addr[c.Rank()], i)
				if err := c.AllReduce(a, a, 1, dtype.I32, comm.Sum); err != nil {
					return err
				}
			}
			return nil
		})
		return errors.Join(err, c.Sync(ctx))
	}))
	for r := range ranks {
		requireFilled(t, data[r], calls, 6)
	}
}

// TestGroupErrors checks that an error anywhere in a group submits nothing of
// it, and leaves the communicator usable.
func TestGroupErrors(t *testing.T) {
	ctx := within(t)
	c := world(t, 1)[0]
	data, addr := perRank(newMemory(t), 2, 8, rankPlusOne)
	copyAll := func() error { return c.AllReduce(addr[0], addr[1], 8, dtype.I32, comm.Sum) }
	for name, tc := range map[string]struct {
		submit func() error
		want   error
	}{
		"of the function": {func() error { _ = copyAll(); return errTest }, errTest},
		"of a call, ignored": {func() error {
			_ = copyAll()
			_ = c.Broadcast(addr[0], -1, dtype.I32, 0)
			return nil
		}, comm.ErrArgument},
		"of a nested group, ignored": {func() error {
			_ = c.Group(func() error { _ = copyAll(); return errTest })
			return nil
		}, errTest},
		"of Sync":    {func() error { _ = copyAll(); _ = c.Sync(ctx); return nil }, comm.ErrArgument},
		"of Barrier": {func() error { _ = copyAll(); _ = c.Barrier(ctx); return nil }, comm.ErrArgument},
		"of Split":   {func() error { _ = copyAll(); _, _ = c.Split(ctx, 0, 0); return nil }, comm.ErrArgument},
		"overlapping messages": {func() error {
			return errors.Join(copyAll(),
				c.Send(addr[0], 8, dtype.I32, 0, 0), c.Recv(at(addr[0], 7), 8, dtype.I32, 0, 0))
		}, comm.ErrArgument},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, c.Group(tc.submit), tc.want)
			require.NoError(t, c.Sync(ctx))
			requireFilled(t, data[1], 8, 2, "was submitted")
		})
	}
	t.Run("panic", func(t *testing.T) {
		require.PanicsWithError(t, "test", func() {
			_ = c.Group(func() error { _ = copyAll(); panic(errTest) })
		})
		require.NoError(t, c.Sync(ctx))
		requireFilled(t, data[1], 8, 2, "was submitted")
	})
	require.NoError(t, c.Group(func() error { return c.Group(copyAll) }))
	require.NoError(t, c.Sync(ctx))
	require.Equal(t, data[0], data[1])
}

// TestEmptyMessagesOverlapNothing groups messages without elements, which point
// into the buffer of another.
func TestEmptyMessagesOverlapNothing(t *testing.T) {
	ctx := within(t)
	c := world(t, 1)[0]
	data, addr := perRank(newMemory(t), 2, 8, rankPlusOne)
	require.NoError(t, c.Group(func() error {
		return errors.Join(
			c.Recv(addr[1], 8, dtype.I32, 0, 0), c.Send(at(addr[1], 4), 0, dtype.I32, 0, 1),
			c.Recv(at(addr[1], 3), 0, dtype.I32, 0, 1), c.Send(addr[0], 8, dtype.I32, 0, 0))
	}))
	require.NoError(t, c.Sync(ctx))
	requireFilled(t, data[1], 8, 1)
}

// TestGroupKeepsOthersOut lets another goroutine submit while a group is open:
// its call must come after those of the group.
func TestGroupKeepsOthersOut(t *testing.T) {
	ctx := within(t)
	c := world(t, 1)[0]
	data, addr := perRank(newMemory(t), 3, 1, rankPlusOne)
	opened, begun := make(chan struct{}), make(chan struct{})
	other := make(chan error, 1)
	go func() {
		<-opened
		close(begun)
		// Reads what the group writes.
		err := c.AllReduce(addr[1], addr[2], 1, dtype.I32, comm.Sum)
		other <- errors.Join(err, c.Sync(ctx))
	}()
	require.NoError(t, c.Group(func() error {
		close(opened)
		<-begun
		for range 1000 {
			if err := c.AllReduce(addr[0], addr[1], 1, dtype.I32, comm.Sum); err != nil {
				return err
			}
		}
		return nil
	}))
	require.NoError(t, <-other)
	require.Equal(t, int32(1), data[2][0])
}

// TestCloseEndsTheWaitForAGroup closes the communicator on which another
// goroutine waits for a group to end.
func TestCloseEndsTheWaitForAGroup(t *testing.T) {
	c := world(t, 1)[0]
	_, addr := perRank(newMemory(t), 1, 1, rankPlusOne)
	other := make(chan error, 1)
	err := c.Group(func() error {
		begun := make(chan struct{})
		go func() {
			close(begun)
			other <- c.AllReduce(addr[0], addr[0], 1, dtype.I32, comm.Sum)
		}()
		<-begun
		require.NoError(t, c.Close())
		require.ErrorIs(t, <-other, comm.ErrClosed)
		return nil
	})
	require.ErrorIs(t, err, comm.ErrClosed)
}

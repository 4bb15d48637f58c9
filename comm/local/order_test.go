package local_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// TestOneGoroutineDrivesAll submits far more than the ring holds, for one rank
// after the other, on one goroutine: submitting must not block.
func TestOneGoroutineDrivesAll(t *testing.T) {
	const ranks, rounds = 3, 5000
	ctx := within(t)
	comms := world(t, ranks)
	data, addr := perRank(newMemory(t), ranks, 5, rankPlusOne)
	for r, c := range comms {
		for i := range rounds {
			require.NoError(t, c.AllReduce(addr[r], addr[r], 5, dtype.I32, comm.Sum))
			require.NoError(t, c.Broadcast(addr[r], 4, dtype.I32, i%ranks))
		}
	}
	want := int32(1 + 2 + 3)
	for range rounds - 1 {
		want *= ranks
	}
	for r, c := range comms {
		require.NoError(t, c.Sync(ctx))
		requireFilled(t, data[r], 5, want)
	}
}

// TestProgressWithoutARank holds one rank off after it has submitted: the
// others must finish without it.
func TestProgressWithoutARank(t *testing.T) {
	for _, n := range []int{1, 1 << 18} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			const ranks = 3
			ctx := within(t)
			comms := world(t, ranks)
			src, srcAt := perRank(newMemory(t), ranks, n, rankPlusOne)
			dst, dstAt := perRank(newMemory(t), ranks, n, constant(0))
			othersDone := make(chan struct{})
			var absent error
			go func() {
				defer close(othersDone)
				requireAll(t, onAll(comms[:2], func(c comm.Communicator) error {
					r := c.Rank()
					if err := c.AllReduce(srcAt[r], dstAt[r], n, dtype.I32, comm.Sum); err != nil {
						return err
					}
					return c.Sync(ctx)
				}))
			}()
			absent = comms[2].AllReduce(srcAt[2], dstAt[2], n, dtype.I32, comm.Sum)
			<-othersDone // without a Sync of rank 2
			require.NoError(t, absent)
			require.NoError(t, comms[2].Sync(ctx))
			for r := range ranks {
				requireFilled(t, dst[r], n, 6)
				requireFilled(t, src[r], n, int32(r+1))
			}
		})
	}
}

// TestManyRanks keeps worlds of far more ranks than processors live.
func TestManyRanks(t *testing.T) {
	const ranks, rounds, n = 64, 200, 100
	for _, procs := range []int{1, 2} {
		t.Run(fmt.Sprintf("procs=%d", procs), func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			ctx := within(t)
			data, addr := perRank(newMemory(t), ranks, n, constant(1))
			requireAll(t, onAll(world(t, ranks), func(c comm.Communicator) error {
				for i := range rounds {
					r := c.Rank()
					data[r][i%n] = int32(r)
					if err := c.AllReduce(addr[r], addr[r], n, dtype.I32, comm.Max); err != nil {
						return err
					}
					if err := c.Sync(ctx); err != nil {
						return err
					}
					if got := data[r][i%n]; got != ranks-1 {
						return fmt.Errorf("round %d: maximum is %d", i, got)
					}
				}
				return nil
			}))
		})
	}
}

// TestFewerProcessorsThanAtStart makes the world spin for a peer that can only
// run when it stops.
func TestFewerProcessorsThanAtStart(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	ctx := within(t)
	comms := world(t, 4)
	runtime.GOMAXPROCS(1)
	_, addr := perRank(newMemory(t), 4, 1<<18, rankPlusOne)
	requireAll(t, onAll(comms, func(c comm.Communicator) error {
		for range 20 {
			if err := c.AllReduce(addr[c.Rank()], addr[c.Rank()], 1<<18, dtype.I32, comm.Sum); err != nil {
				return err
			}
			if err := c.Barrier(ctx); err != nil {
				return err
			}
		}
		return nil
	}))
}

// TestConcurrentGoroutinesOfARank lets several goroutines use one communicator
// at the same time: with messages, which have a tag per goroutine, and with
// collectives, which are all the same, as those of different goroutines have no
// order that the ranks could agree on.
func TestConcurrentGoroutinesOfARank(t *testing.T) {
	const ranks, goroutines, rounds = 3, 4, 200
	ctx := within(t)
	m := newMemory(t)
	var users []comm.Communicator
	for range goroutines {
		users = append(users, world(t, ranks)...)
	}
	for i := range users {
		users[i] = users[i%ranks]
	}
	in, inAt := perRank(m, len(users), rounds, constant(-1))
	out, outAt := perRank(m, len(users), rounds, func(user, i int) int32 { return int32(user + i*len(users)) })
	requireAll(t, onUsers(users, func(user int, c comm.Communicator) error {
		r, tag := user%ranks, uint32(user/ranks)
		for i := range rounds {
			err := c.Group(
				comm.SendCall(at(outAt[user], i), 1, dtype.I32, (r+1)%ranks, tag),
				comm.RecvCall(at(inAt[user], i), 1, dtype.I32, (r+ranks-1)%ranks, tag))
			if err != nil {
				return err
			}
		}
		return nil
	}))
	requireAll(t, onAll(users[:ranks], func(c comm.Communicator) error { return c.Sync(ctx) }))
	for user := range users {
		r, g := user%ranks, user/ranks
		require.Equal(t, out[(r+ranks-1)%ranks+g*ranks], in[user], "goroutine %d of rank %d", g, r)
	}
	requireAll(t, onUsers(users, func(user int, c comm.Communicator) error {
		for range rounds {
			a := inAt[user]
			if err := errors.Join(c.AllReduce(a, a, 1, dtype.I32, comm.Sum), c.Sync(ctx)); err != nil {
				return err
			}
		}
		return nil
	}))
}

package schedule_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// restless is a wire on which something always moves.
type restless struct{ *wire }

func (restless) Looks(bool) bool { return true }
func (restless) Moved() bool     { return true }

// A wait hears that a rank is gone while other messages of its communicator move.
func TestLostRankBesideTraffic(t *testing.T) {
	n := newNetwork(2)
	c := n.joinBy(0, restless{n.wires[0]})
	n.lose(1, errors.New("cable cut"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := c.Barrier(ctx)
	assert.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.ErrorContains(t, err, "rank 1 is gone: cable cut")
	assert.NoError(t, ctx.Err())
	assert.NoError(t, c.Close())
}

// crowded is a wire that has no room for messages of rank 1 before their receives.
type crowded struct{ *wire }

func (crowded) Early(rank int) int  { return 300 * rank }
func (crowded) Unread(rank int) int { return 500 * rank }

// A wait for a rank that can send nothing, or to which nothing can be sent, for want of receives, says so: for a message
// and for a collective.
func TestCrowded(t *testing.T) {
	const early = "300 bytes of messages have come from rank 1 before their receives, and no more fit: " +
		"post receives in the order of the sends, or before them"
	values := []int64{1}
	p := hostmem.Addr(values)
	defer runtime.KeepAlive(values) // the engines have its address alone
	const unread = "500 bytes have gone to rank 1 without a receive, and the others wait until it receives"
	for name, call := range map[string]struct {
		do     func(c comm.Communicator) error
		reason string
	}{
		"message":           {func(c comm.Communicator) error { return c.Recv(p, 1, dtype.I64, 1, 0) }, early},
		"collective":        {func(c comm.Communicator) error { return c.Broadcast(p, 1, dtype.I64, 1) }, early},
		"message that goes": {func(c comm.Communicator) error { return c.Send(p, 1, dtype.I64, 1, 0) }, unread},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(2)
			c := n.joinBy(0, crowded{n.wires[0]})
			require.NoError(t, call.do(c))
			err := c.Sync(&ending{t.Context(), func() {}})
			require.ErrorIs(t, err, comm.ErrTimeout)
			require.ErrorContains(t, err, call.reason)
			_ = c.Close() // it has failed
		})
	}
}

// ending is a context that ends when it is asked, after something else.
type ending struct {
	context.Context
	before func()
}

func (c *ending) Err() error {
	c.before()
	return context.DeadlineExceeded
}

// A wait whose context ends when the last rank has begun a round over shared memory takes part in what all others see
// completed.
func TestContextEndsBehindRound(t *testing.T) {
	const size, count = 2, 3
	n := newNetwork(size)
	memory := hostmem.Bytes(make([]uint64, schedule.SegmentBytes(size)/8+1))
	var engines [size]*schedule.Engine
	var ranks [size]comm.Communicator
	for r, w := range n.wires {
		check := backend.Check{Backend: "network", Rank: r, WorldSize: size}
		engines[r] = schedule.New(schedule.Config{Check: check, Wire: w, MaxTag: 1 << 62})
		engines[r].Share(memory, nil)
		ranks[r] = backend.New(&engines[r].Check, &engines[r].Life, &endpoint{Engine: engines[r], wire: w, stop: make(chan struct{})})
	}
	values := [size][]int64{{1, 2, 3}, {10, 20, 30}}
	reduce := func(rank int) error {
		p := hostmem.Addr(values[rank])
		return ranks[rank].AllReduce(p, p, count, dtype.I64, comm.Sum)
	}
	require.NoError(t, reduce(0))
	ctx := &ending{t.Context(), func() { assert.NoError(t, reduce(1)) }}
	require.NoError(t, engines[0].Wait(ctx, comm.OpSync))
	require.NoError(t, ranks[1].Sync(t.Context()))
	for _, got := range values {
		assert.Equal(t, []int64{11, 22, 33}, got)
	}
	for _, c := range ranks {
		assert.NoError(t, c.Close())
	}
}

// A wait that reaches its deadline reports the missing ranks with no lock held: another goroutine may end the
// communicator.
func TestLateWithoutLock(t *testing.T) {
	n := newNetwork(3)
	var engine *schedule.Engine
	var late []int
	free := make(chan struct{})
	say := func(ranks []int) {
		late = ranks
		go func() {
			engine.Fail(comm.OpSync, errors.New("another failure"))
			close(free)
		}()
		select {
		case <-free:
		case <-time.After(time.Minute):
			assert.Fail(t, "the engine is locked")
		}
	}
	check := backend.Check{Backend: "network", Rank: 0, WorldSize: 3}
	engine = schedule.New(schedule.Config{Check: check, Wire: n.wires[0], MaxTag: 1 << 62, Late: say})
	stop := make(chan struct{})
	c := backend.New(&engine.Check, &engine.Life, &endpoint{Engine: engine, wire: n.wires[0], stop: stop})
	values := []int64{1}
	defer runtime.KeepAlive(values) // the engine has its address alone
	p := hostmem.Addr(values)
	require.NoError(t, c.Recv(p, 1, dtype.I64, 2, 0))
	ctx := &ending{t.Context(), func() {}}
	assert.ErrorIs(t, engine.Wait(ctx, comm.OpSync), comm.ErrTimeout)
	assert.Equal(t, []int{2}, late)
	assert.ErrorIs(t, c.Close(), comm.ErrTimeout)
}

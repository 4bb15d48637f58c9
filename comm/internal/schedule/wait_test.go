package schedule_test

import (
	"context"
	"errors"
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

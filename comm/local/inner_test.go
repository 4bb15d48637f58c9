package local

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// tellingWorld makes two communicators whose small collectives go through cells,
// and a buffer for each: one element, rank+1.
func tellingWorld(t *testing.T) (comms []comm.Communicator, data [][]int32, addr []uintptr) {
	t.Helper()
	procs := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(max(procs, 2))
	t.Cleanup(func() { runtime.GOMAXPROCS(procs) })
	comms, err := New(2)
	require.NoError(t, err)
	for r, c := range comms {
		t.Cleanup(func() { _ = c.Close() })
		data = append(data, []int32{int32(r + 1)})
		addr = append(addr, hostmem.Addr(hostmem.Bytes(data[r])))
	}
	return comms, data, addr
}

// TestSleeperWhoseSmallCollectiveOthersFinish lets rank 0 sleep behind a message: it is
// rank 1 that tells rank 0's small collective then, and finishes it at once.
func TestSleeperWhoseSmallCollectiveOthersFinish(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	comms, data, addr := tellingWorld(t)
	_, messages, messageAddr := tellingWorld(t)
	c, peer, w := comms[0], comms[1], comms[0].(*communicator).e.world
	synced := make(chan error, 1)
	go func() {
		synced <- errors.Join(
			c.Recv(messageAddr[0], 1, dtype.I32, 1, 0),
			c.AllReduce(addr[0], addr[0], 1, dtype.I32, comm.Sum),
			c.Sync(ctx),
			c.Send(messageAddr[0], 1, dtype.I32, 1, 1),
			c.Sync(ctx))
	}()
	for w.sleepers.Load() == 0 && ctx.Err() == nil {
		runtime.Gosched()
	}
	require.NoError(t, peer.Group(
		comm.SendCall(messageAddr[1], 1, dtype.I32, 0, 0),
		comm.AllReduceCall(addr[1], addr[1], 1, dtype.I32, comm.Sum)))
	require.NoError(t, peer.Recv(messageAddr[1], 1, dtype.I32, 0, 1))
	require.NoError(t, peer.Sync(ctx))
	require.NoError(t, <-synced)
	for r := range comms {
		assert.Equal(t, []int32{3}, data[r])
		assert.Equal(t, []int32{2}, messages[r])
	}
}

// TestSmallLeavesBuffersOfWhoKnows lets rank 1, which has begun before the world broke,
// tell its part after rank 0 has heard of that: rank 0's result is not made any more.
func TestSmallLeavesBuffersOfWhoKnows(t *testing.T) {
	comms, data, addr := tellingWorld(t)
	require.NoError(t, comms[0].AllReduce(addr[0], addr[0], 1, dtype.I32, comm.Sum))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, comms[0].Sync(ctx), comm.ErrCanceled)
	call := comm.AllReduceCall(addr[1], addr[1], 1, dtype.I32, comm.Sum)
	x, e := newEntry(&call), comms[1].(*communicator).e
	e.mu.Lock()
	e.tell(&x)
	e.mu.Unlock()
	require.ErrorIs(t, comms[0].Sync(t.Context()), comm.ErrBroken)
	require.NoError(t, comms[0].Close())
	assert.Equal(t, []int32{1}, data[0])
	assert.Equal(t, []int32{3}, data[1], "rank 1 does not know yet")
}

// TestSpinShrinksAfterASleep lets rank 0 fall asleep: it spun in vain, so it spins less
// the next time, though what it is woken for is there at once.
func TestSpinShrinksAfterASleep(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	comms, _, addr := tellingWorld(t)
	c, peer := comms[0].(*communicator), comms[1]
	c.e.spin.Store(int64(maxSpin))
	synced := make(chan error, 1)
	go func() {
		synced <- errors.Join(c.Recv(addr[0], 1, dtype.I32, 1, 0), c.Sync(ctx))
	}()
	for c.e.world.sleepers.Load() == 0 && ctx.Err() == nil {
		runtime.Gosched()
	}
	require.NoError(t, errors.Join(peer.Send(addr[1], 1, dtype.I32, 0, 0), peer.Sync(ctx)))
	require.NoError(t, <-synced)
	assert.Less(t, time.Duration(c.e.spin.Load()), maxSpin)
}

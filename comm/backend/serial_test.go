package backend_test

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
	"github.com/tutti-go/tutti/dtype"
)

// slow is a worker whose calls end when they are let go, and which notes what it is
// asked for.
type slow struct {
	work  chan error // what a call returns
	meet  chan error
	left  chan error
	calls chan []comm.Call
}

func newSlow() *slow {
	return &slow{make(chan error, 9), make(chan error, 9), make(chan error, 9), make(chan []comm.Call, 9)}
}

func (s *slow) Work(calls []comm.Call) error {
	s.calls <- calls
	return <-s.work
}

func (s *slow) Collective(w comm.Wait) (comm.Communicator, error) { return nil, <-s.meet }

func (s *slow) Leave(_ context.Context, cause error) {
	s.left <- cause
	if cause != nil {
		s.work <- cause // what is in flight ends
		s.meet <- cause
	}
}

func serial() (comm.Communicator, *slow) {
	s := newSlow()
	return backend.NewSerial(&backend.Check{Backend: "slow", WorldSize: 1}, s), s
}

// examples/wire has the conformance test of a communicator like this one. Here is what
// only a worker can see.
func TestSerial(t *testing.T) {
	c, s := serial()
	counts := []int{2}
	require.NoError(t, c.AllGatherV(64, 64, counts, []int{0}, dtype.U8))
	counts[0] = 7 // the caller's again
	require.NoError(t, c.Group(comm.BroadcastCall(64, 1, dtype.U8, 0), comm.BroadcastCall(64, 2, dtype.U8, 0)))
	first := <-s.calls
	require.Len(t, first, 1)
	assert.Equal(t, []int{2}, first[0].RecvCounts)
	assert.Empty(t, s.calls, "one after the other")
	s.work <- nil
	assert.Len(t, <-s.calls, 2)
	s.work <- nil
	require.NoError(t, c.Sync(t.Context()))
	s.meet <- nil
	require.NoError(t, c.Barrier(t.Context()))

	over, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 {
		require.NoError(t, c.Sync(over), "there is nothing to wait for")
	}
	require.NoError(t, c.Close())
	require.NoError(t, c.Close())
	assert.NoError(t, <-s.left)
	assert.Empty(t, s.left)
	assert.ErrorIs(t, c.Sync(t.Context()), comm.ErrClosed)
}

// A wait whose context ends aborts the communicator, and returns when the worker has stopped.
func TestSerialGivesUp(t *testing.T) {
	c, s := serial()
	require.NoError(t, c.Broadcast(64, 1, dtype.U8, 0))
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := c.Sync(ctx)
	assert.ErrorIs(t, err, comm.ErrTimeout)
	assert.ErrorContains(t, err, "slow: sync on rank 0")
	assert.ErrorIs(t, <-s.left, comm.ErrTimeout)
	assert.ErrorIs(t, c.Broadcast(64, 1, dtype.U8, 0), comm.ErrBroken)
	require.NoError(t, c.Close())
	assert.Empty(t, s.left, "told once")
}

// An error of the worker aborts the communicator, and so does Abort.
func TestSerialFails(t *testing.T) {
	failure := errors.New("no more")
	c, s := serial()
	s.work <- failure
	require.NoError(t, c.Broadcast(64, 1, dtype.U8, 0))
	assert.ErrorIs(t, c.Sync(t.Context()), failure)
	assert.ErrorIs(t, <-s.left, failure)

	c, s = serial()
	require.NoError(t, c.Broadcast(64, 1, dtype.U8, 0))
	c.Abort(failure)
	assert.ErrorIs(t, <-s.left, failure)
}

// late is a worker that finishes what is in progress when it leaves.
type late struct {
	child   comm.Communicator // of a Split
	began   chan bool
	leaving chan bool
	working bool // guarded by the promise that it is over when Abort returns
}

func newLate() (comm.Communicator, *late) {
	l := &late{newScript(), make(chan bool), make(chan bool), true}
	return backend.NewSerial(&backend.Check{Backend: "late", WorldSize: 1}, l), l
}

func (l *late) Work([]comm.Call) error {
	close(l.began)
	<-l.leaving
	for range 100 {
		runtime.Gosched()
	}
	l.working = false
	return nil
}

func (l *late) Collective(comm.Wait) (comm.Communicator, error) {
	close(l.began)
	<-l.leaving
	return l.child, nil
}

func (l *late) Leave(context.Context, error) { close(l.leaving) }

// A Split that succeeds here when its wait has ended leaves nothing open.
func TestSerialClosesALateSubCommunicator(t *testing.T) {
	c, l := newLate()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-l.began
		cancel()
	}()
	made, err := c.Split(ctx, 0, 0)
	assert.ErrorIs(t, err, comm.ErrCanceled)
	assert.Nil(t, made)
	assert.ErrorIs(t, l.child.Err(), comm.ErrClosed)
}

// Abort returns when the worker has let go of the rank's buffers.
func TestSerialAbortsBeforeItReturns(t *testing.T) {
	c, l := newLate()
	require.NoError(t, allReduce(c))
	<-l.began
	c.Abort(nil)
	assert.False(t, l.working)
	require.NoError(t, c.Close())
}

package nccl

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/peers"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/dtype"
)

// The error of a rank whose wait times out says what each other rank is doing, and those ranks learn of it.
func TestWhatTheOthersDo(t *testing.T) {
	server := store.NewServer(store.Options{})
	calls := []comm.Call{comm.BroadcastCall(0, 4, dtype.F32, 1), comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum)}
	const size = 6
	ranks := make([]*submissions, size)
	groups := make([]*peers.Group, size)
	for r := range ranks {
		ranks[r] = new(submissions)
		if r == 5 {
			continue // it has not come yet
		}
		client := server.Local(fmt.Sprint("rank ", r))
		groups[r] = peers.Join(t.Context(), client, "0", r, size, ranks[r].status)
		if r == 4 {
			continue
		}
		ranks[r].add(&calls[0])
		drain(ranks[r])
		if r != 3 {
			ranks[r].add(&calls[1])
		}
	}
	abort := func(r int, cause error) error {
		ranks[r].abort(cause)
		return describeFailure(cause, groups[r].Abort(t.Context(), cause.Error(), ranks[r].seen.Load()))
	}
	const busy = "in flight: allreduce of 16 f32, sum (collective #2)"
	const others = "rank 3: idle after broadcast of 4 f32, root 1 (collective #1); rank 4: no call yet; " +
		"rank 5: communicator closed, or not made yet"
	err := abort(0, ranks[0].ledger.InFlight().Error(expired()))
	require.ErrorIs(t, err, comm.ErrTimeout)
	const timeout = "timed out: context deadline exceeded, waiting for allreduce of 16 f32, sum (collective #2)"
	assert.EqualError(t, err, timeout+"; ranks 1, 2: "+busy+"; "+others)

	known := groups[1].Failed(2)
	require.ErrorIs(t, known, comm.ErrPeerFailed)
	assert.ErrorContains(t, known, "rank 0 aborted: "+timeout)
	assert.Equal(t, known, abort(1, known), "it says who is to blame")
	require.NoError(t, groups[2].Failed(1), "rank 0 has done that")

	// NCCL names an address.
	remote := fmt.Errorf("allreduce: %w", &Error{Status: int32(statusRemote), Text: "remote process exited"})
	groups[3].Leave()
	err = abort(2, remote)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	require.ErrorIs(t, err, remote)
	assert.ErrorContains(t, err, "; rank 0: aborted: "+timeout+"; rank 1: aborted: peer failed: rank 0 aborted")
	assert.ErrorContains(t, err, "; ranks 3, 5: communicator closed, or not made yet")
}

// expired is a context whose deadline has passed.
func expired() context.Context {
	ctx, cancel := context.WithDeadline(context.Background(), time.Unix(0, 0))
	cancel()
	return ctx
}

// Other errors do not depend on the peers.
func TestErrorsThatNameAReason(t *testing.T) {
	for _, err := range []error{&Error{Status: int32(statusInvalidArg)}, errors.New("changed its mind"), comm.ErrPeerFailed} {
		assert.Equal(t, err, describeFailure(err, "rank 1: no call yet"))
	}
	assert.Equal(t, comm.ErrTimeout, describeFailure(comm.ErrTimeout, ""), "a rank without peers")
}

// Calls that are aborted end one after the other, which takes longer the more there are.
func TestTimeOfCallsThatEnd(t *testing.T) {
	s := new(submissions)
	reduce := comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum)
	send := comm.SendCall(0, 3, dtype.F32, 1, 7)
	assert.Zero(t, s.inFlight())
	for range 60 {
		s.add(&reduce)
	}
	for range 3 {
		s.add(&send)
		s.addOwn()
	}
	require.EqualValues(t, 63, s.inFlight())
	const shared = "63 calls took 8.8 s on a GPU that three processes shared"
	assert.Greater(t, endingTime(s.inFlight(), false), 9*time.Second, shared)
	assert.Greater(t, endingTime(0, true), 5*time.Second, "of graphs nothing is known")
	drain(s)
	assert.Zero(t, endingTime(s.inFlight(), false))
	assert.LessOrEqual(t, endingTime(1<<40, true), endingMost)
}

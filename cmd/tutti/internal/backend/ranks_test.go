package backend

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// device is a communicator like those of GPUs: it does not know of its peers'
// failures, and only a wait whose context ends breaks it.
type device struct {
	comm.Communicator
	rank    int
	pending bool
	once    sync.Once
	aborted chan struct{}
}

func newDevice(rank int, pending bool) *device {
	return &device{rank: rank, pending: pending, aborted: make(chan struct{})}
}

func (d *device) Rank() int    { return d.rank }
func (d *device) Abort(error)  { d.once.Do(func() { close(d.aborted) }) }
func (d *device) Close() error { return nil }

func (d *device) Sync(ctx context.Context) error {
	if !d.pending {
		return nil
	}
	select {
	case <-d.aborted:
		return comm.ErrBroken
	case <-ctx.Done():
		d.Abort(ctx.Err())
		return comm.ContextError(ctx)
	}
}

// guardedRank is a rank with a guarded communicator.
func guardedRank(c comm.Communicator, limit time.Duration) Rank {
	g := &guard{limit: limit}
	return Rank{Comm: g.watch(c), guard: g}
}

func TestOneFailureEndsAllRanks(t *testing.T) {
	failure := errors.New("rank 2 has had enough")
	devices := []*device{newDevice(0, true), newDevice(1, true), newDevice(2, true)}
	var ranks []Rank
	for _, d := range devices {
		ranks = append(ranks, guardedRank(d, 0))
	}
	err := run(t.Context(), ranks, func(ctx context.Context, r Rank) error {
		switch r.Comm.Rank() {
		case 0: // waits as it should
			return r.Comm.Sync(ctx)
		case 1: // is in a call that no context ends
			<-devices[1].aborted
			return errors.New("the call failed")
		}
		return failure
	})
	assert.ErrorIs(t, err, failure)
	assert.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.ErrorContains(t, err, "the call failed")
	for _, d := range devices {
		<-d.aborted
	}
}

// A communicator that a rank makes for itself ends with the others.
func TestOneFailureEndsWatchedCommunicators(t *testing.T) {
	failure := errors.New("rank 1 has had enough")
	own := newDevice(0, true)
	closed := newDevice(0, true)
	err := run(t.Context(), []Rank{guardedRank(newDevice(0, false), 0), guardedRank(newDevice(1, false), 0)}, func(_ context.Context, r Rank) error {
		if r.Comm.Rank() == 1 {
			return failure
		}
		assert.NoError(t, r.Watch(closed).Close())
		beside := r.Watch(own)
		// A wait that only an abort ends, as that of SyncCommStream.
		return beside.Sync(context.WithoutCancel(t.Context()))
	})
	assert.ErrorIs(t, err, failure)
	assert.ErrorIs(t, err, comm.ErrBroken)
	select {
	case <-closed.aborted:
		t.Error("a communicator that was closed is touched")
	default:
	}
}

// A rank may have nothing pending when the context ends, and something later.
func TestAbandonLooksAgain(t *testing.T) {
	cause := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	d := newDevice(0, true)
	looks := 0
	err := run(ctx, []Rank{guardedRank(syncFunc{d, func(ctx context.Context) error {
		if looks++; looks < 3 {
			return nil
		}
		return d.Sync(ctx)
	}}, 0)}, func(context.Context, Rank) error {
		cancel(cause)
		<-d.aborted
		return context.Cause(ctx)
	})
	assert.ErrorIs(t, err, cause)
}

// syncFunc is a communicator with another Sync.
type syncFunc struct {
	comm.Communicator
	sync func(context.Context) error
}

func (s syncFunc) Sync(ctx context.Context) error { return s.sync(ctx) }

func TestRanksThatSucceedAreLeftAlone(t *testing.T) {
	d := newDevice(0, true)
	require.NoError(t, run(t.Context(), []Rank{guardedRank(d, 0)}, func(context.Context, Rank) error { return nil }))
	select {
	case <-d.aborted:
		t.Error("aborted")
	default:
	}
}

func TestWaitsAreBounded(t *testing.T) {
	comms, err := local.New(2)
	require.NoError(t, err)
	defer comms[1].Close() //nolint:errcheck // broken
	r := guardedRank(comms[0], time.Millisecond)
	c := r.Comm
	err = c.Barrier(t.Context())
	assert.ErrorIs(t, err, comm.ErrTimeout)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "timed out: --timeout 1ms")
	found, ok := comm.As[comm.Reacher](c)
	require.True(t, ok)
	assert.Equal(t, comms[0], found)
	require.NoError(t, c.Close())

	assert.ErrorIs(t, r.Watch(newDevice(0, true)).Sync(t.Context()), comm.ErrTimeout)
	ctx, cancel := r.Within(t.Context())
	defer cancel()
	_, bounded := ctx.Deadline()
	assert.True(t, bounded)

	ctx, cancel = guardedRank(newDevice(0, true), 0).Within(t.Context())
	defer cancel()
	_, bounded = ctx.Deadline()
	assert.False(t, bounded)
}

func TestRanksThatBoundTheirOwnWaitsAreNotWatched(t *testing.T) {
	d := newDevice(0, false)
	assert.Equal(t, d, Rank{}.Watch(d))
	ctx, cancel := Rank{}.Within(t.Context())
	defer cancel()
	_, bounded := ctx.Deadline()
	assert.False(t, bounded)
}

func TestLocationsAreThoseOfAllRanks(t *testing.T) {
	rt := cpu.New()
	defer rt.Close() //nolint:errcheck
	for _, want := range [][]string{{"cuda:0 here", "cuda:1 there", "cuda:2 ü"}, nil} {
		err := local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
			r := Rank{Comm: c, Runtime: rt}
			if want != nil {
				r.Location = want[c.Rank()]
			}
			locations, err := Locations(ctx, r)
			if fmt.Sprint(locations) != fmt.Sprint(want) {
				t.Errorf("rank %d has %q, want %q", c.Rank(), locations, want)
			}
			return err
		})
		require.NoError(t, err)
	}
}

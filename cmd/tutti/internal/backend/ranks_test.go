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

func (d *device) Rank() int { return d.rank }

func (d *device) Sync(ctx context.Context) error {
	if !d.pending {
		return nil
	}
	select {
	case <-d.aborted:
		return comm.ErrBroken
	case <-ctx.Done():
		d.once.Do(func() { close(d.aborted) })
		return comm.ContextError(ctx)
	}
}

func TestOneFailureEndsAllRanks(t *testing.T) {
	failure := errors.New("rank 2 has had enough")
	ranks := []Rank{{Comm: newDevice(0, true)}, {Comm: newDevice(1, true)}, {Comm: newDevice(2, true)}}
	err := runRanks(t.Context(), ranks, func(ctx context.Context, r Rank) error {
		switch r.Comm.Rank() {
		case 0: // waits as it should
			return r.Comm.Sync(ctx)
		case 1: // is in a call that no context ends
			<-r.Comm.(*device).aborted
			return errors.New("the call failed")
		}
		return failure
	})
	assert.ErrorIs(t, err, failure)
	assert.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.ErrorContains(t, err, "the call failed")
	for _, r := range ranks {
		<-r.Comm.(*device).aborted
	}
}

// A rank may have nothing pending when the context ends, and something later.
func TestAbandonLooksAgain(t *testing.T) {
	cause := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	d := newDevice(0, true)
	looks := 0
	err := runRanks(ctx, []Rank{{Comm: syncFunc{d, func(ctx context.Context) error {
		if looks++; looks < 3 {
			return nil
		}
		return d.Sync(ctx)
	}}}}, func(context.Context, Rank) error {
		cancel(cause)
		<-d.aborted
		return context.Cause(ctx)
	})
	assert.ErrorIs(t, err, cause)
}

// syncFunc relocations a communicator's Sync.
type syncFunc struct {
	comm.Communicator
	sync func(context.Context) error
}

func (s syncFunc) Sync(ctx context.Context) error { return s.sync(ctx) }

func TestRanksThatSucceedAreLeftAlone(t *testing.T) {
	d := newDevice(0, true)
	require.NoError(t, runRanks(t.Context(), []Rank{{Comm: d}}, func(context.Context, Rank) error { return nil }))
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
	c := bounded(comms[0], time.Millisecond)
	assert.ErrorIs(t, c.Barrier(t.Context()), comm.ErrTimeout)
	found, ok := comm.As[comm.Unwrapper](c)
	require.True(t, ok)
	assert.Equal(t, comms[0], found.Unwrap())
	assert.Equal(t, comms[1], bounded(comms[1], 0))
	require.NoError(t, c.Close())
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

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
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// device is a communicator like those of GPUs: an abort ends operations in flight.
type device struct {
	comm.Communicator
	rank    int
	once    sync.Once
	aborted chan struct{}
}

func newDevice(rank int) *device { return &device{rank: rank, aborted: make(chan struct{})} }

func (d *device) Rank() int    { return d.rank }
func (d *device) Abort(error)  { d.once.Do(func() { close(d.aborted) }) }
func (d *device) Close() error { return nil }

func (d *device) Sync(ctx context.Context) error {
	select {
	case <-d.aborted:
		return comm.ErrBroken
	case <-ctx.Done():
		return comm.ContextError(ctx)
	}
}

func TestOneFailureEndsAllRanks(t *testing.T) {
	failure := errors.New("rank 2 has had enough")
	devices := []*device{newDevice(0), newDevice(1), newDevice(2)}
	beside := newDevice(0)
	err := comm.Run(t.Context(), []comm.Communicator{devices[0], devices[1], devices[2]}, func(ctx context.Context, c comm.Communicator) error {
		r := Rank{}
		r.Comm = r.Watch(ctx, c)
		switch r.Comm.Rank() {
		case 0: // waits for a communicator that it made itself, in a call that no context ends
			return r.Watch(ctx, beside).Sync(context.WithoutCancel(ctx))
		case 1: // is in a call that only an abort ends
			<-devices[1].aborted
			return errors.New("the call failed")
		}
		return failure
	})
	assert.ErrorIs(t, err, failure)
	assert.ErrorIs(t, err, comm.ErrBroken)
	assert.ErrorContains(t, err, "the call failed")
	for _, d := range append(devices, beside) {
		<-d.aborted
	}
}

func TestTheEndOfTheContextAborts(t *testing.T) {
	cause := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	comms, err := local.New(2)
	require.NoError(t, err)
	defer comms[1].Close() //nolint:errcheck // aborted
	c := Rank{}.Watch(ctx, comms[0])
	cancel(cause)
	err = c.Barrier(context.WithoutCancel(ctx))
	assert.ErrorIs(t, err, comm.ErrBroken)
	assert.ErrorIs(t, err, cause)
	require.NoError(t, c.Close())
}

func TestWaitsAreBounded(t *testing.T) {
	comms, err := local.New(2)
	require.NoError(t, err)
	defer comms[1].Close() //nolint:errcheck // aborted
	r := Rank{limit: time.Millisecond}
	c := r.Watch(t.Context(), comms[0])
	err = c.Barrier(t.Context())
	assert.ErrorIs(t, err, comm.ErrTimeout)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "timed out: --timeout 1ms")
	found, ok := comm.As[backend.MemoryChecker](c)
	require.True(t, ok)
	assert.Equal(t, comms[0], found)
	require.NoError(t, c.Close())

	assert.ErrorIs(t, r.Watch(t.Context(), newDevice(0)).Sync(t.Context()), comm.ErrTimeout)
	for _, r := range []Rank{r, {}} {
		ctx, cancel := r.Within(t.Context())
		defer cancel()
		_, bounded := ctx.Deadline()
		assert.Equal(t, r.limit > 0, bounded)
	}
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

package backend

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
)

func TestEveryBackendAnswers(t *testing.T) {
	for _, b := range All() {
		found, err := Find(b.Name)
		require.NoError(t, err)
		assert.Equal(t, b.Name, found.Name)
		assert.NotEmpty(t, b.Summary)
		detail, err := b.Probe(t.Context())
		if err != nil {
			assert.ErrorIs(t, err, comm.ErrUnavailable, b.Name)
			err = b.Run(t.Context(), Options{}, func(context.Context, Rank) error { return nil })
			assert.ErrorIs(t, err, comm.ErrUnavailable, b.Name)
			continue
		}
		assert.NotEmpty(t, detail)
	}
	_, err := Find("smoke-signals")
	assert.ErrorContains(t, err, `"smoke-signals"`)
}

func TestWorldsHaveTheRanksThatWereAskedFor(t *testing.T) {
	for _, c := range []struct {
		name      string
		ask, want int
	}{{"local", 0, 4}, {"local", 3, 3}, {"noop", 0, 1}, {"noop", 1, 1}} {
		b, err := Find(c.name)
		require.NoError(t, err)
		var bodies atomic.Int64
		require.NoError(t, b.Run(t.Context(), Options{Ranks: c.ask}, func(ctx context.Context, r Rank) error {
			bodies.Add(1)
			sum, err := Reduce(ctx, r, []int64{int64(r.Comm.Rank()), 1}, comm.Sum)
			assert.NoError(t, err)
			assert.Equal(t, []int64{int64(c.want * (c.want - 1) / 2), int64(c.want)}, sum)
			return nil
		}))
		assert.EqualValues(t, c.want, bodies.Load(), c.name)
	}
}

func TestNoopRefusesMoreRanks(t *testing.T) {
	err := noopBackend.Run(t.Context(), Options{Ranks: 2}, nil)
	var wrong *OptionError
	require.ErrorAs(t, err, &wrong)
	assert.Equal(t, "noop: has one rank, not 2", err.Error())
}

func TestLocalRefusesTooManyRanks(t *testing.T) {
	err := localBackend.Run(t.Context(), Options{Ranks: 100_000}, nil)
	var wrong *OptionError
	require.ErrorAs(t, err, &wrong)
	assert.Equal(t, "local: --ranks 100000, at most 1024 work in one process", err.Error())
}

func TestLocalBoundsWaits(t *testing.T) {
	gaveUp := make(chan struct{})
	err := localBackend.Run(t.Context(), Options{Ranks: 2, Timeout: time.Millisecond}, func(ctx context.Context, r Rank) error {
		if r.Comm.Rank() == 1 {
			<-gaveUp
			return nil
		}
		defer close(gaveUp)
		return r.Comm.Barrier(ctx)
	})
	assert.ErrorIs(t, err, comm.ErrTimeout)
	assert.ErrorContains(t, err, "--timeout 1ms")
}

func TestErrorsOfAnyRankComeBack(t *testing.T) {
	failure := errors.New("rank 2 has had enough")
	err := localBackend.Run(t.Context(), Options{Ranks: 3}, func(ctx context.Context, r Rank) error {
		if r.Comm.Rank() == 2 {
			return failure
		}
		return r.Comm.Barrier(ctx)
	})
	assert.ErrorIs(t, err, failure)
	assert.ErrorIs(t, err, comm.ErrPeerFailed, "the others do not wait for ever")
}

package poll_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/internal/poll"
)

func TestUntilAsksUntilYes(t *testing.T) {
	asked := 0
	assert.NoError(t, poll.Until(t.Context(), func() (bool, error) {
		asked++
		return asked == 1000, nil // through all phases of waiting
	}))
	assert.Equal(t, 1000, asked)
}

func TestUntilEndsWithAnError(t *testing.T) {
	broken := errors.New("broken")
	assert.ErrorIs(t, poll.Until(t.Context(), func() (bool, error) { return false, broken }), broken)
}

func TestUntilEndsWithTheContext(t *testing.T) {
	why := errors.New("why")
	ctx, cancel := context.WithCancelCause(t.Context())
	asked := 0
	assert.ErrorIs(t, poll.Until(ctx, func() (bool, error) {
		if asked++; asked == 500 {
			cancel(why)
		}
		return false, nil
	}), why)
	assert.Equal(t, 500, asked)
}

// A completed event counts, even if the context has ended meanwhile.
func TestUntilPrefersDone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.NoError(t, poll.Until(ctx, func() (bool, error) { return true, nil }))
}

// In a bubble the clock stands until everybody sleeps, the one that polls as well.
func TestUntilReachesADeadlineInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		assert.ErrorIs(t, poll.Until(ctx, func() (bool, error) { return false, nil }), context.DeadlineExceeded)
	})
}

func TestPaceReachesADeadlineInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for pace := (poll.Pace{}); ctx.Err() == nil; {
			pace.Next()
		}
	})
}

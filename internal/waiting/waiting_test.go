package waiting_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/waiting"
)

// A wait is reminded after 2 s, and at most every 2 minutes.
func TestReminder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		r := waiting.Remind()
		defer r.Stop()
		var at []time.Duration
		for range 9 {
			<-r.C
			at = append(at, time.Since(began))
			assert.Equal(t, time.Since(began), r.Next())
		}
		const s = time.Second
		assert.Equal(t, []time.Duration{2 * s, 6 * s, 14 * s, 30 * s, 62 * s, 126 * s, 246 * s, 366 * s, 486 * s}, at)
	})
}

// A context without a deadline gets one, and its cause says so.
func TestBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, limit := range []time.Duration{0, time.Minute} {
			began := time.Now()
			ctx, cancel := waiting.Bounded(t.Context(), limit)
			<-ctx.Done()
			want := limit
			if limit == 0 {
				want = 10 * time.Minute
			}
			assert.Equal(t, want, time.Since(began))
			require.ErrorIs(t, context.Cause(ctx), context.DeadlineExceeded)
			assert.ErrorContains(t, context.Cause(ctx), "TUTTI_CONNECT_TIMEOUT")
			cancel()
		}
		deadline := time.Now().Add(time.Hour)
		ctx, cancel := context.WithDeadline(t.Context(), deadline)
		defer cancel()
		ctx, end := waiting.Bounded(ctx, time.Minute)
		defer end()
		got, _ := ctx.Deadline()
		assert.Equal(t, deadline, got, "that of the program counts")
	})
}

func TestReadLimit(t *testing.T) {
	for text, want := range map[string]time.Duration{"90s": 90 * time.Second, "1h": time.Hour, "": 0, "0": 0, "-1s": 0, "x": 0} {
		limit, err := waiting.ReadLimit(text)
		assert.Equal(t, want, limit)
		assert.Equal(t, want == 0, err != nil, "%q", text)
	}
}

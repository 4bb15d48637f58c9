package poll_test

import (
	"context"
	"errors"
	"testing"

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

// What is done is done, also if the context has ended meanwhile.
func TestUntilPrefersDone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.NoError(t, poll.Until(ctx, func() (bool, error) { return true, nil }))
}

package store

import (
	"context"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
)

// lateContext has a deadline that passes when a test says so, a moment before the context ends.
type lateContext struct {
	context.Context
	passed atomic.Bool
}

func (c *lateContext) Deadline() (time.Time, bool) {
	if c.passed.Load() {
		return time.Now(), true
	}
	return time.Now().Add(time.Hour), true
}

// attempts is a network where no attempt to connect succeeds.
type attempts struct {
	Network
	fail func(n int) error
	n    int
}

func (a *attempts) Dial(context.Context, string, string) (net.Conn, error) {
	a.n++
	return nil, a.fail(a.n)
}

// The reason for which nobody was found is not that the time was over: the last attempt that had its time says it.
func TestReasonAtTheDeadline(t *testing.T) {
	inner, cancel := context.WithCancelCause(t.Context())
	ctx := &lateContext{Context: inner}
	network := &attempts{fail: func(n int) error {
		switch n {
		case 1:
			return syscall.ECONNREFUSED
		case 2: // the system notices the deadline first
			ctx.passed.Store(true)
		case 3:
			cancel(context.DeadlineExceeded)
		}
		return os.ErrDeadlineExceeded
	}}
	_, err := Dialer{Name: "rank 0", Addresses: []string{"store:29400"}, Network: network}.Dial(ctx)
	require.ErrorIs(t, err, comm.ErrCanceled)
	assert.ErrorIs(t, err, syscall.ECONNREFUSED)
	assert.NotErrorIs(t, err, os.ErrDeadlineExceeded)
}

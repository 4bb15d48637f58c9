package backend

import (
	"context"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// boundedComm is a communicator whose waits end after a time.
type boundedComm struct {
	comm.Communicator
	limit time.Duration
}

// bounded bounds each wait of c, 0 for not at all.
func bounded(c comm.Communicator, limit time.Duration) comm.Communicator {
	if limit == 0 {
		return c
	}
	return &boundedComm{Communicator: c, limit: limit}
}

// Unwrap lets [comm.As] find what c can do beyond a communicator.
func (b *boundedComm) Unwrap() comm.Communicator { return b.Communicator }

func (b *boundedComm) Sync(ctx context.Context) error {
	ctx, cancel := within(ctx, b.limit)
	defer cancel()
	return b.Communicator.Sync(ctx)
}

func (b *boundedComm) Barrier(ctx context.Context) error {
	ctx, cancel := within(ctx, b.limit)
	defer cancel()
	return b.Communicator.Barrier(ctx)
}

func (b *boundedComm) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	ctx, cancel := within(ctx, b.limit)
	defer cancel()
	c, err := b.Communicator.Split(ctx, color, key)
	if c == nil || err != nil {
		return nil, err
	}
	return bounded(c, b.limit), nil
}

// within is ctx with a deadline after limit, 0 for none.
func within(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if limit == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, limit)
}

package comm

import (
	"context"
	"time"
)

// Limited is a communicator whose waits (Sync, Barrier, Split) end after a time,
// if their context does not end first. So does what Split makes of it.
type Limited struct {
	Wrapped
	limit time.Duration
	cause error
}

// Limit returns a Limited around c. A wait that the limit ends is [ErrTimeout],
// and breaks the communicator as any deadline does; cause is what the error says
// beside that, nil for [context.DeadlineExceeded]. A limit of 0 is none.
func Limit(c Communicator, limit time.Duration, cause error) *Limited {
	return &Limited{Wrap(c), limit, cause}
}

// within is ctx with the limit.
func (l *Limited) within(ctx context.Context) (context.Context, context.CancelFunc) {
	if l.limit == 0 {
		return ctx, func() {}
	}
	return context.WithTimeoutCause(ctx, l.limit, l.cause)
}

// Sync implements [Communicator].
func (l *Limited) Sync(ctx context.Context) error {
	ctx, cancel := l.within(ctx)
	defer cancel()
	return l.Communicator.Sync(ctx)
}

// Barrier implements [Communicator].
func (l *Limited) Barrier(ctx context.Context) error {
	ctx, cancel := l.within(ctx)
	defer cancel()
	return l.Communicator.Barrier(ctx)
}

// Split implements [Communicator].
func (l *Limited) Split(ctx context.Context, color, key int) (Communicator, error) {
	within, cancel := l.within(ctx)
	defer cancel()
	c, err := l.Communicator.Split(within, color, key)
	if c == nil || err != nil {
		return nil, err
	}
	return Limit(c, l.limit, l.cause), nil
}

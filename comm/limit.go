package comm

import (
	"context"
	"time"
)

// limited is the communicator of [Limit].
type limited struct {
	Methods
	Waits
	Wrapped
	limit time.Duration // of a wait; more than 0
	cause error         // wrapped by the error of a wait that reaches it; nil for context.DeadlineExceeded
}

// Limit returns a communicator around c whose waits (Sync, Barrier, Split) end after
// a time, if their context does not end first. Its sub-communicators have the same limit.
// A wait that reaches it returns [ErrTimeout] and aborts the communicator, as any deadline
// does. The error also wraps cause, or [context.DeadlineExceeded] if cause is nil. If limit
// is 0, Limit returns c.
func Limit(c Communicator, limit time.Duration, cause error) Communicator {
	if limit == 0 {
		return c
	}
	l := &limited{
		Wrapped: Wrap(c),
		limit:   limit,
		cause:   cause,
	}
	l.Methods = Methods{
		Do:       func(call Call) error { return call.Make(c) },
		Together: func(calls []Call) error { return c.Group(calls...) },
	}
	l.Waits = Waits{l.wait}
	return l
}

func (l *limited) wait(ctx context.Context, w Wait) (Communicator, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, l.limit, l.cause)
	defer cancel()
	child, err := w.Make(ctx, l.Communicator)
	if err != nil || child == nil {
		return nil, err
	}
	return Limit(child, l.limit, l.cause), nil
}

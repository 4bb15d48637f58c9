package comm

import (
	"context"
	"sync/atomic"
)

// Turns keeps the rule of [Communicator].Sync about goroutines that wait. The
// methods that [NewCalls] makes have one; a decorator that submits by itself has
// another. The zero value is ready.
type Turns struct {
	waiters  atomic.Int32  // goroutines that wait, since there are messages
	messages atomic.Uint64 // submitted so far,
	settled  atomic.Uint64 // and of these, before a wait that has ended well began
}

// Count notes calls that are submitted.
func (t *Turns) Count(calls []Call) {
	for i := range calls {
		if calls[i].Op.Message() {
			t.messages.Add(1)
		}
	}
}

// Admitted returns a context for the waits by which a decorator does one that its
// Turns have admitted. The communicator that it wraps does not refuse them: a message
// may have been submitted since then, and the decorator have done its part.
func Admitted(ctx context.Context) context.Context { return admitted{ctx} }

type admitted struct{ context.Context }

func (a admitted) Value(key any) any {
	if key == (admitted{}) {
		return true
	}
	return a.Context.Value(key)
}

// Begin starts a wait, which ends by End, or returns [ErrBusy]. Waits from before the
// first message are not counted, which costs nothing: they wait for no exchange.
func (t *Turns) Begin(ctx context.Context) (messages uint64, err error) {
	if messages = t.messages.Load(); messages == 0 {
		return 0, nil
	}
	for alone := messages > t.settled.Load() && ctx.Err() == nil; ; {
		n := t.waiters.Load()
		if alone && n > 0 && ctx.Value(admitted{}) == nil {
			return 0, ErrBusy
		}
		if t.waiters.CompareAndSwap(n, n+1) {
			return messages, nil
		}
	}
}

// End ends a wait that had so many messages before it, and this error.
func (t *Turns) End(messages uint64, err error) {
	if messages == 0 {
		return
	}
	if err == nil && t.settled.Load() != messages {
		// An older number that overwrites a newer one errs on the safe side.
		t.settled.Store(messages)
	}
	t.waiters.Add(-1)
}

package backend

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// guard looks after the communicators of a rank: it bounds their waits, and
// ends what they have submitted when the ranks of the process fail.
type guard struct {
	limit time.Duration // of each wait, 0 for none

	mu    sync.Mutex
	comms []*guarded // those that are open
}

// guarded is a communicator that a guard looks after.
type guarded struct {
	comm.Communicator
	guard *guard
}

// watch puts c under the guard, until what is returned is closed.
func (g *guard) watch(c comm.Communicator) comm.Communicator {
	return g.add(comm.Limit(c, g.limit, overdue{g.limit}))
}

func (g *guard) add(c comm.Communicator) comm.Communicator {
	w := &guarded{Communicator: c, guard: g}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.comms = append(g.comms, w)
	return w
}

// abort ends what the communicators have submitted: a wait with a context that
// has ended breaks them, unless nothing is pending at that moment.
func (g *guard) abort(ended context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock() // nobody closes a communicator meanwhile
	for _, w := range g.comms {
		_ = w.Communicator.Sync(ended) // the cause is known
	}
}

// Unwrap lets [comm.As] find what c can do beyond a communicator.
func (w *guarded) Unwrap() comm.Communicator { return w.Communicator }

func (w *guarded) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := w.Communicator.Split(ctx, color, key)
	if c == nil || err != nil {
		return nil, err
	}
	return w.guard.add(c), nil
}

func (w *guarded) Close() error {
	g := w.guard
	g.mu.Lock()
	g.comms = slices.DeleteFunc(g.comms, func(other *guarded) bool { return other == w })
	g.mu.Unlock()
	return w.Communicator.Close()
}

// overdue is the cause of a context that a limit ended.
type overdue struct{ limit time.Duration }

// Error names the flag that sets the limit.
func (o overdue) Error() string { return fmt.Sprintf("--timeout %v", o.limit) }

// Unwrap makes it a [context.DeadlineExceeded].
func (overdue) Unwrap() error { return context.DeadlineExceeded }

// within is ctx with a deadline after limit, 0 for none.
func within(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if limit == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, limit, overdue{limit})
}

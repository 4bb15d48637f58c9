package nccl

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/poll"
)

// state is where a communicator is in its life. Two things happen to it, each at
// most once and in either order: it breaks, and it is closed.
//
//	sound ──breakDown──► failing ──its kernels ended──► broken
//	                        └──────they do not end────► stuck
//
// A sound communicator that is not closed takes calls. Failing, it has aborted
// what carries data; control lives on for Shrink, until it is closed. Close waits
// for what is pending on a sound one, which breaks if that does not end, and
// otherwise for the end of failing. Then it gives the memory back, but for that of
// a stuck one, which stays where it is.
type state struct {
	life    context.Context // ends when Close is called
	end     context.CancelFunc
	closing sync.Once
	failure atomic.Pointer[failure] // nil: sound
}

// failure is how a communicator broke.
type failure struct {
	cause   error
	drained chan struct{} // closed at the end of failing
	stuck   bool          // then: kernels of this rank go on
}

// closed reports whether Close was called.
func (s *state) closed() bool { return s.life.Err() != nil }

// usable returns why nothing can be submitted any more, nil if it can.
func (s *state) usable() error { return backend.Unusable(s.closed(), s.cause()) }

// sound returns what broke the communicator, nil if nothing did.
func (s *state) sound() error { return backend.Unusable(false, s.cause()) }

func (s *state) cause() error {
	if f := s.failure.Load(); f != nil {
		return f.cause
	}
	return nil
}

// settled reports whether no kernel of this rank uses the communicator's memory
// any more, once nothing is pending. It waits for the end of failing.
func (s *state) settled() bool {
	f := s.failure.Load()
	if f == nil {
		return true
	}
	<-f.drained
	return !f.stuck
}

// untilClosed returns a context that ends with ctx, and when Close is called.
func (s *state) untilClosed(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.life, func() { cancel(comm.ErrClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// breakDown breaks the communicator: it aborts what carries data, so that nothing waits
// for a peer that will not come, and returns the cause when its kernels have
// ended.
func (c *Comm) breakDown(cause error) error {
	f := &failure{cause: cause, drained: make(chan struct{})}
	if c.failure.CompareAndSwap(nil, f) {
		c.tellOthers(cause)
		c.data.abort()
		c.windows.native.Load().abort()
		f.stuck = !c.drain()
		close(f.drained)
	}
	if !c.settled() {
		return fmt.Errorf("%w; the GPU still waits for a peer, in a collective that NCCL cannot end: restart the process", cause)
	}
	return cause
}

// tellTimeout bounds how long a rank that gives up waits for the others to know it.
const tellTimeout = time.Second

// tellOthers lets the other ranks know that this one gives up, before its abort: see
// abandoned.
func (c *Comm) tellOthers(cause error) {
	c.submitted.broke(cause)
	if c.reporter == nil || c.WorldSize() == 1 || c.submitted.hasLeft() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), tellTimeout)
	defer cancel()
	c.reporter.Abort(ctx, c.name, c.Rank(), c.submitted.how(), c.submitted.seenDone())
}

// drainTimeout bounds how long a communicator that broke waits for its kernels
// to end. An abort takes milliseconds to reach them.
const drainTimeout = 3 * time.Second

// drain waits for the end of aborted kernels, and reports whether it came.
func (c *Comm) drain() bool {
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	// A stream that cannot be asked belongs to a device on which nothing runs.
	_ = poll.Until(ctx, c.done)
	return ctx.Err() == nil
}

package backend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// Life is the lifecycle of a rank's communicator. [New] makes the methods Err, Abort and Close from it, and a backend
// asks it whether to accept a call and tells it when the ranks are out of step. The zero value is a sound
// communicator.
//
//	          Fail: the first cause stays          Backend.Abort: peers told,
//	                                               nothing in flight
//	sound ───────────────────────────► aborting ──────────────────► aborted
//	  │                                   ▲                            │
//	  │ Close: calls are refused          │ the drain fails            │ Close
//	  ▼                                   │                            ▼
//	draining ─────────────────────────────┴────────────────────► Backend.Release
//	             nothing in flight
//
// Fail only marks, so a backend may call it under its locks; waits in progress return
// then. The backend's Abort follows, once, before a call, a wait, Abort or Close returns
// for that reason; so their error means that nobody touches the rank's buffers any more,
// unlike the error of Err, which does not wait. Release comes last. Sub-communicators have
// their own lives: Close and Abort leave them alone, and [comm.CloseAll] includes them.
type Life struct {
	// Timeout bounds the drain and the release in Close, and an abort if it is less than
	// [AbortTimeout]; [HostTimeout] if it is 0.
	Timeout time.Duration

	down   atomic.Pointer[error] // the error of refused calls; nil if calls are accepted
	broken atomic.Pointer[error] // an [comm.ErrBroken] with the first cause; points to nil if Release came first
	known  atomic.Bool           // the user has received the cause

	base    *Base   // without the handle around it, which may be garbage collected
	backend Backend // whose Abort and Release are called; nil before New

	mu       sync.Mutex              // guards context, end, aborting and children
	context  context.Context         // ends with the first of Fail and Close; see Until
	end      context.CancelCauseFunc // ends context; nil before the first Until; guarded by mu
	aborting chan struct{}           // closed by Fail; see Aborting
	children []comm.Communicator     // sub-communicators that may be open

	closing atomic.Bool // Close or Forget was called
	closes  sync.Once   // makes Close do its work once
	ending  sync.Mutex  // held during Backend.Abort and Backend.Release
	aborted bool        // Abort was called, or must not be called any more
}

// brokenError is an [comm.ErrBroken] with its cause.
type brokenError struct{ cause error }

func (b *brokenError) Error() string {
	return fmt.Sprintf("%v: %v", comm.ErrBroken, b.cause)
}
func (b *brokenError) Unwrap() []error { return []error{comm.ErrBroken, b.cause} }

// Cause returns the cause that comes with a [comm.ErrBroken], and other errors as they are.
func Cause(err error) error {
	if broken := (*brokenError)(nil); errors.As(err, &broken) {
		return broken.cause
	}
	return err
}

// Err returns the reason why calls are refused: [comm.ErrClosed], [comm.ErrBroken] with the first cause, or nil. A
// backend calls it under the lock under which it accepts a call, so that a call either comes before a Close, which
// waits for it, or is refused.
func (l *Life) Err() error {
	if down := l.down.Load(); down != nil {
		return *down
	}
	return nil
}

// Broken returns a [comm.ErrBroken] with the first cause passed to Fail, nil if there is none. A wait that ends
// because of that cause returns it, even while Close drains.
func (l *Life) Broken() error {
	if broken := l.broken.Load(); broken != nil {
		return *broken
	}
	return nil
}

// Cause returns that cause alone.
func (l *Life) Cause() error {
	if broken := l.Broken(); broken != nil {
		return broken.(*brokenError).cause
	}
	return nil
}

// Closed reports whether Close was called.
func (l *Life) Closed() bool { return l.closing.Load() }

// Fail marks the communicator aborted because of cause, which leaves the ranks out of step, and ends the contexts of
// Until. It returns false, and does nothing, after an earlier cause and after Release has begun. If cause is a
// [comm.ErrBroken], Fail uses its cause, which aborted a communicator below.
func (l *Life) Fail(cause error) (first bool) {
	var broken error = &brokenError{Cause(cause)}
	first = l.broken.CompareAndSwap(nil, &broken)
	if earlier := l.broken.Load(); *earlier != nil {
		l.down.CompareAndSwap(nil, earlier) // the first caller may not have stored it yet
	}
	if !first {
		return false
	}
	l.mu.Lock()
	close(l.failed())
	l.mu.Unlock()
	l.endWaits(cause)
	return true
}

// Aborting returns a channel that is closed when Fail is called. It is for waits, which continue during Close.
func (l *Life) Aborting() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed()
}

// failed is Aborting with mu held.
func (l *Life) failed() chan struct{} {
	if l.aborting == nil {
		l.aborting = make(chan struct{})
	}
	return l.aborting
}

// Until returns a context that ends with ctx, on Fail, and on Close. It is for work that is not worth finishing once
// the communicator closes. The context's cause tells which of them ended it.
func (l *Life) Until(ctx context.Context) (context.Context, context.CancelFunc) {
	l.mu.Lock()
	if l.context == nil {
		l.context, l.end = context.WithCancelCause(context.Background())
		if err := l.Cause(); err != nil {
			l.end(err)
		} else if l.closing.Load() {
			l.end(comm.ErrClosed)
		}
	}
	life := l.context
	l.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(life, func() { cancel(context.Cause(life)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

func (l *Life) endWaits(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end != nil {
		l.end(cause)
	}
}

// Explain returns an error of the backend as an error of op. An error that is not [Refused] aborts the communicator.
// Methods that a handle adds to [Base] use Explain.
func (l *Life) Explain(op string, err error) error {
	if !Refused(err) {
		l.Fail(err)
		l.abort()
		l.known.Store(true)
	}
	return l.base.check.Fail(op, err)
}

// abort makes the backend abort, once, after Fail. It returns after that.
func (l *Life) abort() {
	l.ending.Lock()
	defer l.ending.Unlock()
	l.abortOnce()
}

// abortOnce is abort with ending held.
func (l *Life) abortOnce() {
	if !l.aborted {
		l.aborted = true
		ctx, cancel := context.WithTimeout(context.Background(), min(AbortTimeout, l.timeout()))
		defer cancel()
		l.backend.Abort(ctx, l.Cause())
	}
}

// close is [Base.Close]. A second one waits for the first.
func (l *Life) close() (err error) {
	l.closes.Do(func() { err = l.closeOnce() })
	return err
}

func (l *Life) closeOnce() error {
	l.closing.Store(true)
	refusal := comm.ErrClosed
	l.down.Store(&refusal)
	l.endWaits(comm.ErrClosed)
	known := l.known.Load()
	err := l.bounded(func(ctx context.Context) error {
		_, err := l.backend.Wait(ctx, comm.Wait{Op: comm.OpSync})
		return err
	})
	if err != nil {
		l.Fail(err)
		err = l.Cause()
	}
	if known {
		err = nil
	}
	l.ending.Lock()
	defer l.ending.Unlock()
	if !l.broken.CompareAndSwap(nil, new(error)) {
		l.abortOnce()
	}
	l.aborted = true
	err = errors.Join(err, l.bounded(l.backend.Release))
	if err == nil {
		return nil
	}
	err = l.base.check.Fail("close", err)
	slog.Warn("comm: a communicator closed with an error", "error", err)
	return err
}

// Forget marks a communicator as closed that nobody can close any more, so that its parent drops it. It does not call
// the backend.
func (l *Life) Forget() {
	refusal := comm.ErrClosed
	l.closing.Store(true)
	l.down.Store(&refusal)
}

// bounded calls f with a context that ends after Timeout.
func (l *Life) bounded(f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), l.timeout())
	defer cancel()
	return f(ctx)
}

func (l *Life) timeout() time.Duration { return cmp.Or(l.Timeout, HostTimeout) }

// Adopt registers a sub-communicator, or closes it if this communicator was closed in the meantime. [Base] adopts the
// communicators that Split makes.
func (l *Life) Adopt(child comm.Communicator) error {
	if l.closing.Load() {
		_ = comm.CloseAll(child, comm.ErrClosed) // its other ranks may have their sub-communicators
		return comm.ErrClosed
	}
	if c, ok := child.(interface{ lifeOf() *Life }); ok {
		child = c.lifeOf().base
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.children = append(slices.DeleteFunc(l.children, gone), child)
	return nil
}

// gone reports whether a sub-communicator is closed, and all of its sub-communicators.
func gone(c comm.Communicator) bool { return closed(c) && len(descendants(c)) == 0 }

// closed avoids calling Err, which tells the user why c was aborted.
func closed(c comm.Communicator) bool {
	if b, ok := comm.As[interface{ lifeOf() *Life }](c); ok {
		return b.lifeOf().Closed()
	}
	return errors.Is(c.Err(), comm.ErrClosed)
}

// descendants returns the open sub-communicators of c, and theirs.
func descendants(c comm.Communicator) []comm.Communicator {
	if p, ok := comm.As[Parent](c); ok {
		return p.SubCommunicators()
	}
	return nil
}

// subCommunicators is [Base.SubCommunicators].
func (l *Life) subCommunicators() (open []comm.Communicator) {
	l.mu.Lock()
	children := slices.Clone(l.children)
	l.mu.Unlock()
	for _, c := range children {
		open = append(open, descendants(c)...)
		if !closed(c) {
			open = append(open, c)
		}
	}
	return open
}

// Refused reports whether a call with this error took no part in an operation, so that the ranks are still in step.
// Its arguments were wrong, the backend does not support it or has no room for it, or the communicator was closed.
func Refused(err error) bool {
	is := func(sentinel error) bool {
		return errors.Is(err, sentinel)
	}
	return !slices.ContainsFunc(outOfStep, is) && slices.ContainsFunc(refusals, is)
}

var (
	// outOfStep are sentinels after which ranks are out of step. They may wrap any cause, since it may be another
	// rank's.
	outOfStep = []error{comm.ErrBroken, comm.ErrPeerFailed, comm.ErrTimeout, comm.ErrCanceled, comm.ErrMismatch}
	// refusals are sentinels of calls that took no part in an operation.
	refusals = []error{
		comm.ErrArgument,
		comm.ErrUnsupported,
		comm.ErrDevice,
		comm.ErrUnavailable,
		comm.ErrExhausted,
		comm.ErrClosed,
	}
)

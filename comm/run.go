package comm

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
)

// PanicError is the error of a rank whose body panicked; see [Run].
type PanicError struct {
	Rank  int
	Value any    // what it panicked with; nil if it called runtime.Goexit
	Stack []byte // where; not in the errors of the other ranks
}

// Error returns the value and, where it is known, the stack.
func (p *PanicError) Error() string {
	if p.Value == nil {
		return "the goroutine ended without returning"
	}
	text := fmt.Sprintf("panic: %v", p.Value)
	if len(p.Stack) > 0 {
		text += "\n" + string(p.Stack)
	}
	return text
}

// Unwrap returns the value if it is an error.
func (p *PanicError) Unwrap() error {
	err, _ := p.Value.(error)
	return err
}

// Ender is implemented by communicators that know what was split off them, and
// can tell the other ranks why this one gives up; see [Run].
type Ender interface {
	// End closes the communicator and those split off it. If cause is not nil, the
	// rank gives up because of it: what is pending is not waited for, and the other
	// ranks get [ErrPeerFailed] with the cause.
	End(cause error) error
}

// Run runs body for every communicator, the ranks of one world in one process,
// on a goroutine of its own, closes the communicators, and returns the joined
// errors.
//
// When a body returns an error or panics (a [*PanicError]), the others learn it:
// their calls fail with [ErrPeerFailed] and the cause if the communicator is an
// [Ender]; in any case their context is done, with that as its cause.
func Run(ctx context.Context, comms []Communicator, body func(ctx context.Context, c Communicator) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	errs := make([]error, len(comms))
	var ranks sync.WaitGroup
	for i, c := range comms {
		ranks.Go(func() {
			runRank(ctx, c, body, &errs[i], cancel)
		})
	}
	ranks.Wait()
	return errors.Join(errs...)
}

// runRank runs the body of one rank. It stores the error instead of returning
// it, as the body may end the goroutine.
func runRank(ctx context.Context, c Communicator, body func(context.Context, Communicator) error, result *error, cancel context.CancelCauseFunc) {
	rank := c.Rank()
	ended := PanicError{Rank: rank}
	returned := false
	defer func() {
		cause := *result
		if !returned {
			ended.Value = recover()
			cause = &ended
			withStack := ended
			withStack.Stack = debug.Stack()
			*result = fmt.Errorf("rank %d: %w", rank, &withStack)
		}
		closed := end(c, cause)
		if cause != nil {
			cancel(fmt.Errorf("%w: rank %d: %w", ErrPeerFailed, rank, cause))
			return
		}
		*result = closed
	}()
	*result = body(ctx, c)
	returned = true
}

// end closes c as an [Ender] does, if it or what it wraps is one. Decorators around
// that one have a Close.
func end(c Communicator, cause error) error {
	if e, ok := c.(Ender); ok {
		return e.End(cause)
	}
	if e, ok := As[Ender](c); ok {
		return errors.Join(e.End(cause), c.Close())
	}
	return c.Close()
}

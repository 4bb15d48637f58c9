package local

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/tutti-go/tutti/comm"
)

// PanicError is the error of a rank whose body panicked.
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

// Run makes a world of n ranks, runs body for each of them on a goroutine of
// its own, closes the communicators (also those that the body split off and
// did not close), and returns the joined errors of all ranks.
//
// A rank whose body returns an error or panics breaks its communicators: the
// other ranks get an error that wraps [comm.ErrPeerFailed] and the cause. A
// panic becomes a [*PanicError].
func Run(ctx context.Context, n int, body func(ctx context.Context, c comm.Communicator) error, opts ...Option) error {
	comms, err := New(n, opts...)
	if err != nil {
		return err
	}
	errs := make([]error, n)
	var ranks sync.WaitGroup
	for r, c := range comms {
		ranks.Go(func() { runRank(ctx, c.(*communicator), body, &errs[r]) })
	}
	ranks.Wait()
	return errors.Join(errs...)
}

// runRank runs the body of one rank. It stores the error instead of returning
// it, as the body may end the goroutine.
func runRank(ctx context.Context, c *communicator, body func(context.Context, comm.Communicator) error, result *error) {
	returned := false
	defer func() {
		if !returned {
			ended := PanicError{Rank: c.e.rank, Value: recover()}
			c.e.abort(&ended)
			withStack := ended
			withStack.Stack = debug.Stack()
			*result = fmt.Errorf("local: rank %d: %w", c.e.rank, &withStack)
			return
		}
		if *result != nil {
			c.e.abort(*result)
			return
		}
		*result = c.e.closeAll()
	}()
	*result = body(ctx, c)
	returned = true
}

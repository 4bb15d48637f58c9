package comm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
	"time"

	"github.com/tutti-go/tutti/internal/ranks"
)

// PanicError is the error of a rank whose body panicked; see [Run].
type PanicError struct {
	Rank  int    // whose body panicked
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

// runPatience is for how long Run waits, after a failure, for bodies to return before it logs which ones do not. Bodies
// in a call return sooner, as its abort ends in seconds.
const runPatience = 10 * time.Second

// Run runs body for every communicator, each on its own goroutine. The communicators are the ranks of one world in
// one process. Run closes them and their sub-communicators ([CloseAll]), and returns the joined errors, each after
// the number of its rank. Errors other than [ErrPeerFailed], which are the causes, come first.
//
// When a body returns an error or panics (a [*PanicError]), its rank aborts ([CloseAll]), so that the others' calls
// fail with [ErrPeerFailed] and the cause, and their context is done, with that as its cause. Run waits for all
// bodies. The log names those that have not returned ten seconds after their context was done.
func Run(ctx context.Context, comms []Communicator, body func(ctx context.Context, c Communicator) error) error {
	outer, nested := ctx.Value(runKey{}).(context.Context) // of the Run whose body this is in
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ctx = context.WithValue(ctx, runKey{}, ctx)
	errs := make([]error, len(comms))
	returned := make(chan int, len(comms))
	for i, c := range comms {
		go func() {
			defer func() { returned <- i }()
			runRank(ctx, c, body, &errs[i], cancel)
		}()
	}
	running := make(map[int]int) // the rank of each communicator whose body has not returned
	for i, c := range comms {
		running[i] = c.Rank()
	}
	done := ctx.Done()
	var patience <-chan time.Time
	for len(running) > 0 {
		select {
		case i := <-returned:
			delete(running, i)
		case <-done:
			done = nil
			patience = time.After(runPatience)
		case <-patience:
			if nested && outer.Err() != nil {
				continue // that one waits for this one, and says so
			}
			stragglers := ranks.Text(slices.Sorted(maps.Values(running)))
			slog.Warn("comm: waiting for "+stragglers+", whose context has ended", "cause", context.Cause(ctx))
		}
	}
	slices.SortStableFunc(errs, func(a, b error) int { return echo(a) - echo(b) })
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// runKey is the key under which the context of a Run is in those of its bodies.
type runKey struct{}

// echo is 1 for an error that reports another rank's failure, and 0 for others.
func echo(err error) int {
	if errors.Is(err, ErrPeerFailed) {
		return 1
	}
	return 0
}

// rankError is what the body of a rank or its Close returned. A Run within another one's
// body names the rank once, if it has the same number there.
type rankError struct {
	rank int // whose body failed
	error
}

func (e *rankError) Error() string {
	return fmt.Sprintf("rank %d: %v", e.rank, e.error)
}

func (e *rankError) Unwrap() error { return e.error }

// runRank runs the body of one rank. It stores the error instead of returning
// it, as the body may end the goroutine.
func runRank(
	ctx context.Context, c Communicator, body func(context.Context, Communicator) error,
	result *error, cancel context.CancelCauseFunc,
) {
	rank := c.Rank()
	returned := false
	defer func() {
		if !returned {
			*result = &PanicError{
				Rank:  rank,
				Value: recover(),
				Stack: debug.Stack(),
			}
		}
		cause := *result
		inner, nested := cause.(*rankError)
		if cause != nil && !(nested && inner.rank == rank) {
			*result = &rankError{rank, cause}
		}
		for ; nested; inner, nested = cause.(*rankError) {
			cause = inner.error
		}
		if p, ok := cause.(*PanicError); ok {
			cause = &PanicError{Rank: p.Rank, Value: p.Value}
		}
		closed := CloseAll(c, cause)
		if cause != nil {
			cancel(fmt.Errorf("%w: rank %d: %w", ErrPeerFailed, rank, cause))
		} else if closed != nil {
			*result = &rankError{rank, closed}
		}
	}()
	*result = body(ctx, c)
	returned = true
}

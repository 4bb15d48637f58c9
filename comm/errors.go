package comm

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/tutti-go/tutti/runtime"
)

// Sentinels that errors of communicators wrap. The first four are those of package
// runtime. ErrClosed and ErrBroken are not: a communicator that is closed or
// aborted leaves the runtime as it was.
var (
	// ErrArgument: an argument is out of range; nothing was sent.
	ErrArgument = runtime.ErrArgument
	// ErrUnsupported: the backend cannot do this for that type; nothing was
	// sent.
	ErrUnsupported = runtime.ErrUnsupported
	// ErrDevice: the backend cannot reach memory of that device.
	ErrDevice = runtime.ErrDevice
	// ErrUnavailable: a library or device that the backend needs is not there.
	ErrUnavailable = runtime.ErrUnavailable

	// ErrClosed: the communicator was closed.
	ErrClosed = errors.New("communicator is closed")
	// ErrBroken: the communicator was aborted earlier. It comes with the first cause.
	ErrBroken = errors.New("communicator was aborted")
	// ErrExhausted: a library, store or machine that the backend needs has no room for more.
	ErrExhausted = errors.New("resources are exhausted")
	// ErrMismatch: ranks disagree on what they called.
	ErrMismatch = errors.New("ranks disagree")
	// ErrPeerFailed: another rank died, panicked, closed or left.
	ErrPeerFailed = errors.New("peer failed")
	// ErrTimeout: the deadline passed before the peers arrived.
	ErrTimeout = errors.New("timed out")
	// ErrCanceled: the context was canceled before the peers arrived.
	ErrCanceled = errors.New("canceled")
)

// OpError tells which operation failed, where, and why.
type OpError struct {
	Backend string // "local", "mpi", …
	Op      string // "allreduce", "sync", …
	Rank    int    // the rank that reports, -1 before there is one
	Err     error  // wraps a sentinel
}

// Error returns "backend: op on rank r: cause".
func (e *OpError) Error() string {
	var b strings.Builder
	if e.Backend != "" {
		b.WriteString(e.Backend + ": ")
	}
	b.WriteString(e.Op)
	if e.Rank >= 0 {
		fmt.Fprintf(&b, " on rank %d", e.Rank)
	}
	b.WriteString(": ")
	b.WriteString(e.Err.Error())
	return b.String()
}

// Unwrap returns the cause.
func (e *OpError) Unwrap() error { return e.Err }

// ContextError turns the error of a finished context into the sentinel that a
// communicator reports ([ErrTimeout] or [ErrCanceled]), keeping the context's
// error and cause in the chain.
func ContextError(ctx context.Context) error {
	sentinel := ErrCanceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		sentinel = ErrTimeout
	}
	return fmt.Errorf("%w: %w", sentinel, context.Cause(ctx))
}

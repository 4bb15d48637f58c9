package backend

import (
	"context"
	"fmt"
	"time"
)

// Stream is the queue of a device that a rank's communicator submits to: a
// backend whose operations run there while the host goes on has it, so that
// they can be measured by the device's own clock. It belongs to the rank's
// goroutine.
type Stream interface {
	// Time runs submit, waits for what that has submitted through the rank's
	// communicator, and returns how long the device took, from when it came to
	// the first operation to when it had finished the last.
	Time(ctx context.Context, submit func() error) (time.Duration, error)
	// Capture records what submit submits through the rank's communicator
	// instead of running it. The buffers must stay allocated as long as the
	// graph is in use.
	Capture(submit func() error) (Graph, error)
}

// ComputeStream is the queue of a device that a rank's runtime computes on,
// where the host runs ahead of it. It belongs to the rank's goroutine.
type ComputeStream interface {
	// Steps submits n steps one behind the other, prepare before each of them, waits
	// for all, and returns how long the device took for the steps: for everything,
	// less what as many prepares take alone.
	Steps(ctx context.Context, n int, prepare, step func() error) (time.Duration, error)
	// Parts is Steps for the parts of steps: each step calls next at the end of each
	// of its parts, and the means of how long the device took for them are returned.
	Parts(
		ctx context.Context,
		n, parts int,
		prepare func() error,
		step func(next func() error) error,
	) ([]time.Duration, error)
	// Capture records what submit submits to the stream, and what is ordered
	// against it, instead of running it.
	Capture(submit func() error) (Graph, error)
}

// Graph is work that was captured, ready to be submitted again and again.
type Graph interface {
	// Launch submits all of it to the stream that it was captured on.
	Launch() error
	// Close frees it.
	Close() error
}

// Needs is the error of an option on a backend that lacks what it needs, such as
// [Stream] or [comm.SymmetricAllocator].
func Needs(backend, option, feature string) error {
	return &OptionError{Backend: backend, Reason: fmt.Sprintf("%s needs a backend with %s: %s", option, feature, "nccl")}
}

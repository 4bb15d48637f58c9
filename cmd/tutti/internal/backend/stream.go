package backend

import (
	"context"
	"fmt"
	"time"
)

// Stream is the device queue that a rank's communicator submits to. A backend has one if its operations run on a
// device while the host continues, so that the device's clock can time them. It belongs to the rank's goroutine.
type Stream interface {
	// Time runs submit, waits for the operations submitted through the rank's communicator, and returns the device's
	// time from the start of the first to the end of the last.
	Time(ctx context.Context, submit func() error) (time.Duration, error)
	// Capture records the operations that submit submits through the rank's communicator instead of running them. The
	// buffers must stay allocated while the graph is in use.
	Capture(submit func() error) (Graph, error)
}

// ComputeStream is the device queue that a rank's runtime computes on if the host runs ahead of it. It belongs to the
// rank's goroutine.
type ComputeStream interface {
	// Steps submits n steps one after the other, with prepare before each, and waits for all. It returns the device's
	// time for the steps, with the time of n prepares subtracted.
	Steps(ctx context.Context, n int, prepare, step func() error) (time.Duration, error)
	// Parts is Steps for parts of steps. Each step calls next at the end of each of its parts. Parts returns the mean
	// device time of each part.
	Parts(
		ctx context.Context,
		n, parts int,
		prepare func() error,
		step func(next func() error) error,
	) ([]time.Duration, error)
	// Capture records the operations that submit submits to the stream, or orders against it, instead of running
	// them.
	Capture(submit func() error) (Graph, error)
}

// Graph is captured work that can be submitted repeatedly.
type Graph interface {
	// Launch submits the work to the stream that it was captured on.
	Launch() error
	// Close frees it.
	Close() error
}

// Needs is the error of an option on a backend that lacks a feature such as [Stream] or [comm.SymmetricAllocator].
func Needs(backend, option, feature string) error {
	return &OptionError{Backend: backend, Reason: fmt.Sprintf("%s needs a backend with %s: %s", option, feature, "nccl")}
}

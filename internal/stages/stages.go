// Package stages reports to benchmarks when the work of each stage of a sparse step has been submitted, so that they
// can record events in between. Packages sparse and ddp take the observer from the context of a step.
package stages

import "context"

// Stage is a part of a sparse step.
type Stage uint8

const (
	Selected  Stage = iota // the gradient is added and the entries are selected
	Exchanged              // the result is available as lists
	Finished               // the result is written to the tensor
)

// Observer is called when the work of a stage has been submitted, with a bucket of package ddp, or 0 for a tensor of
// package sparse. stream is the stream of Selected and Finished; Exchanged is on the communicator's stream. Calls may
// come from another goroutine, one at a time.
type Observer func(bucket int, s Stage, stream uintptr)

type key struct{}

// Observe returns a context whose steps call f.
func Observe(ctx context.Context, f Observer) context.Context {
	return context.WithValue(ctx, key{}, f)
}

// From returns the observer of a context, nil if it has none.
func From(ctx context.Context) Observer {
	f, _ := ctx.Value(key{}).(Observer)
	return f
}

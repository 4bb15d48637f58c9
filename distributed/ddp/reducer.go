package ddp

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/runtime"
)

// Reducer reduces the gradients of a bucket as a program wants it: another compression, or
// another algorithm. Overlap, accumulation, Join, clipping, the verdict on non-finite
// gradients, transactions, State and Rebind are those of other buckets.
//
// One that is a [fmt.Stringer] names its settings, which the ranks compare before the first step; otherwise they
// compare its type.
type Reducer interface {
	// Reduce replaces b.Tensor, which holds this rank's gradients, by (an approximation of) their
	// average over the ranks, with the same bits on each: by work that is submitted to the
	// tensor's runtime, and by collectives of b.Comm between such work, which all ranks make in
	// the same order. Package distributed has them with that order. It may run on another
	// goroutine than Ready, one bucket at a time. b.Tensor is F32, F16 or BF16, and may have elements
	// that are not finite: the step is judged afterwards. After an error of Reduce, the step waits for what it has
	// submitted to b.Comm, until the step's context is done. What it has submitted to other communicators, it
	// waits for itself.
	Reduce(ctx context.Context, b Bucket) error
	// Memory returns what Reduce leaves to later steps, always the same tensors of the bucket's
	// runtime. They are what they were before Reduce after a step that failed or was skipped, are
	// part of [Gradients.State], and are freed by [Gradients.Close].
	Memory() Memory
}

// Memory is what a [Reducer] leaves to later steps.
type Memory struct {
	// Residual is the memory of the residual, as F32: where a run goes on with other ranks, its sum over the
	// ranks stays.
	Residual []*runtime.Tensor
	// Shared is the same on all ranks.
	Shared []*runtime.Tensor
	// Scratch is what a step needs and does not leave: it is freed only.
	Scratch []*runtime.Tensor
}

// Bucket is a bucket of gradients that a [Reducer] reduces. Tensor and Parts are the same in all steps.
type Bucket struct {
	Index  int
	Step   int               // how many steps were reduced before, without those that were skipped
	Tensor *runtime.Tensor   // all its elements, one part after the other
	Comm   comm.Communicator // of the ranks that average
	Parts  []Part
}

// Part is a gradient in a bucket. With [Config].Mesh a bucket is this rank's share of one, and a part what it
// has of a gradient: a vector, so that a Reducer that goes by shapes, such as PowerSGD's, has nothing to compress.
type Part struct {
	Param  int   // its number
	Shape  []int // of the parameter
	Offset int   // of its first element
}

// reducer reduces one bucket, step after step: Select, Exchange, Complete, and then Commit, or
// RollBack instead of whatever comes next. A [sparse.Reducer] is one, which says what they do; plain
// and custom are the others.
type reducer interface {
	Drain(ctx context.Context) error
	Select(ctx context.Context, in engine.Input) error
	Exchange(ctx context.Context) error
	InFlight() bool
	Complete(ctx context.Context) (hostWaited bool, err error)
	Commit(v engine.Verdict) error
	RollBack() error

	JoinTransaction(flags, skip uintptr)
	Terms() string
	// Skipped reports whether the device has rolled the last step back, which was committed as deferred.
	Skipped(ctx context.Context) (bool, error)
	State(ctx context.Context) ([]byte, error)
	SharedState(ctx context.Context) ([]byte, error)
	PrepareRestore(ctx context.Context, states ...[]byte) (restore func(context.Context) error, err error)
	ScaleResidual(factor float64) error
	Rebind(c comm.Communicator) error
	Close() error
}

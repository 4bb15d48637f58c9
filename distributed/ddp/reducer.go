package ddp

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/runtime"
)

// Reducer reduces the gradients of a bucket by the program's own compression or algorithm. Overlap, accumulation, Join,
// clipping, the verdict on non-finite gradients, transactions, State and Rebind work as for other buckets.
//
// A Reducer may implement [fmt.Stringer] to name its settings, which the ranks compare before the first step. Otherwise
// they compare its type.
type Reducer interface {
	// Reduce replaces b.Tensor, which holds this rank's gradients, with (an approximation of) their average over the
	// ranks, bit-identical on each. It submits work to the tensor's runtime and, in between, calls collectives of b.Comm,
	// which all ranks call in the same order. The functions of package distributed order such collectives with the work.
	// Reduce may run on another goroutine than Ready, one bucket at a time. b.Tensor is F32, F16 or BF16, and may have
	// non-finite elements: the step is judged afterwards. After an error of Reduce, the step waits for the work that
	// Reduce has submitted to b.Comm, until the step's context is done. Reduce itself waits for its work on other
	// communicators.
	Reduce(ctx context.Context, b Bucket) error
	// Memory returns the tensors that Reduce keeps for later steps, always the same ones, of the bucket's runtime. A step
	// that fails or is skipped restores them. They are part of [Gradients.State], and [Gradients.Close] frees them.
	Memory() Memory
}

// Memory holds the tensors of a [Reducer].
type Memory struct {
	// Residual is the residual, in F32. If a run continues with other ranks, its sum over the ranks is preserved.
	Residual []*runtime.Tensor
	// Shared is the same on all ranks.
	Shared []*runtime.Tensor
	// Scratch is used within a step. It is freed, but neither restored nor saved.
	Scratch []*runtime.Tensor
}

// Bucket is a bucket of gradients that a [Reducer] reduces. Tensor and Parts are the same in all steps.
type Bucket struct {
	Index  int               // in the order of Gradients.Buckets
	Step   int               // how many steps were reduced before, without those that were skipped
	Tensor *runtime.Tensor   // all its elements, one part after the other
	Comm   comm.Communicator // of the ranks that average
	Parts  []Part            // of the tensor, one for each gradient
}

// Part is a gradient in a bucket. With [Config].Mesh a bucket is this rank's share of one, and a part is its portion of
// a gradient. That is a vector, so a Reducer that depends on shapes, such as PowerSGD's, has nothing to compress.
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

package ddp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/internal/repeats"
	"github.com/tutti-go/tutti/runtime"
)

// Gradients averages the gradients of a model over the ranks, or adds them up, during the backward pass.
//
// Gradients are put into buckets of one type each, in reverse order of registration, because a backward pass computes
// the last layer's gradient first. A bucket is reduced as soon as all its gradients, and all buckets before it, are
// ready. So all ranks reduce the same buckets in the same order, even if their gradients become ready in different
// orders.
//
// A dense bucket is submitted in Ready and completed in Wait. Meanwhile the communicator works on it if it makes
// progress by itself or has its own stream; events then order buckets and compute, and the host never waits. With
// streams, a bucket's gradients are copied into one buffer, in symmetric memory if available ([comm.Allocate]).
// Otherwise all but the small ones are reduced in place, as one group.
//
// Ready selects the entries that a sparse bucket sends. Without streams the exchange is asynchronous: a communication
// worker, a goroutine of the Gradients, makes it during the backward pass (with [sparse.Config].NoUndo, Ready does).
// With streams, a side stream selects, exchanges and merges each bucket after an event of the compute stream, if the
// runtime has side streams ([runtime.StreamForker]); otherwise the compute stream does. If an exchange makes the host
// wait, as [sparse.Oktopk] does, the worker does all of this or, with NoUndo, Ready.
//
// If any bucket is sparse, has a [Reducer], or clipping or detection of non-finite gradients is on, all buckets commit
// or roll back together, unless [sparse.Config].NoUndo is set. Wait writes the results if all buckets have one and all
// gradients are finite. An error of Ready persists until Wait, which returns it too and ends the step. Gradients and
// residuals on this rank are then as before the step, bit for bit. The step can be repeated or left out, with the same
// communicator or another one ([Gradients.Rebind]). An error while results are written is permanent.
//
//	for step := range steps {
//		// backward pass: after the gradient of parameter i is complete
//		err := sync.Ready(ctx, i, gradient)
//		...
//		err = sync.Wait(ctx) // all gradients are averages now
//	}
//
// or, without overlap, [Gradients.ReduceAll].
//
// A Gradients belongs to one goroutine at a time, and so does its
// communicator between the first Ready and the end of Wait.
type Gradients struct {
	// All fields belong to the goroutine that calls the methods. While a step is in flight, the communication worker
	// (async) works on the buckets that it was given, on the meter and on the side stream; it hands them back by wait.

	rt        runtime.Runtime       // of the gradients
	meter     *metered.Communicator // counts what the ranks send; another one after Rebind
	lines     lines                 // meter, or with a Mesh the communicators that were split from it
	order     base.Order            // has meter's work and the compute stream wait for each other
	cfg       Config                // with its defaults
	op        comm.ReduceOp         // of dense buckets
	gradients []gradient            // in the order of registration
	roster    roster                // tells at the beginning of a step who has data; zero without Uneven and Weighted
	weights   weights               // what this rank's gradients stand for; zero without Weighted

	// heldRolledBack says that the contributions held for a reproducible step are of one that was rolled back. A step that
	// repeats it uses them, and the first contribution to another step drops them.
	heldRolledBack bool

	arrangement             // buckets, bucketOf, patterns, transaction, async, views and shards: see phase.go
	side        *sideStream // nil: sparse buckets are worked on where gradients are computed
	agreed      bool        // the ranks have compared what they reduce; false after Rebind

	step    step              // in flight, from the first Ready to the end of Wait: see phase.go
	spans   *base.Spans       // finds gradients of a step that share memory
	joining []*runtime.Tensor // in Join: gradients of zeros, for this rank that has no data; nil outside of Join
	steps   int               // complete ones
	results []*runtime.Tensor // what was given in the last of them; nil before the first
	stats   Stats             // of it; zero before the first
	// undecided says that stats.Skipped is not known: the device alone knows the verdict on the last complete step.
	undecided bool
	skips     repeats.Log // logs skipped steps and lost residuals, ever less often
	err       error       // sticky; returned by every later call. nil: usable
	closed    bool        // Close was called

	onStep  func(Stats)                 // nil: nobody is told
	confirm func(context.Context) error // see BeforeCommit; nil: ranks do not vote
}

// gradientError is err, of gradient i.
func gradientError(i int, err error) error {
	return &distributed.TensorError{
		Role:  "gradient",
		Index: i,
		Err:   err,
	}
}

// reachable checks that the communicator reaches a tensor's memory, and that its runtime works on the stream of g's.
func (g *Gradients) reachable(t *runtime.Tensor) error {
	if _, err := base.Address("gradient", "source", g.meter, t); err != nil {
		return err
	}
	return base.SameStream(g.rt, t.Runtime())
}

// Views returns the tensors in which a backward pass computes the gradients, in the order of registration. Without
// [Config].BucketViews it returns nil. The tensors have the shapes and types of the parameters, are aligned to their
// elements, start as zeros, and are valid until Close. Call Views again after a Restore that makes other buckets, and
// after a [Gradients.Rebind] if steps are plain allreduces: the tensors are replaced, and their contents are lost.
func (g *Gradients) Views() []*runtime.Tensor {
	return slices.Clone(g.views)
}

// Buckets returns for each bucket, in the order of reduction, the numbers of
// its gradients.
func (g *Gradients) Buckets() [][]int {
	all := make([][]int, len(g.buckets))
	for i, b := range g.buckets {
		all[i] = slices.Clone(b.params)
	}
	return all
}

// BeforeCommit makes Wait call f as [sparse.Reducer.BeforeCommit] does, for all buckets. Plain buckets are not rolled
// back. With [Config].Reproducible, either all ranks have an f or none has.
func (g *Gradients) BeforeCommit(f func(ctx context.Context) error) {
	g.confirm = f
}

// OnStep makes Wait and Join call f at the end of each completed step, for metrics, with the [Stats] that the host has.
// If the device decides whether a step is skipped, only [Gradients.Stats] reports it, because it waits for the device.
// OnStep(nil) ends the calls. Call OnStep between steps.
func (g *Gradients) OnStep(f func(Stats)) {
	g.onStep = f
}

// Result returns the average of gradient i in the last complete step. It is the tensor that was passed or, if the
// gradient was left out, a vector that is valid until the next step's Wait or Close. It is nil before the first step.
func (g *Gradients) Result(i int) *runtime.Tensor {
	return g.results[i]
}

// Stats returns the statistics of the last complete step. If only the device knows whether that was skipped, Stats
// waits for the device until ctx is done. While the communication worker works on a step, this is [comm.ErrArgument].
func (g *Gradients) Stats(ctx context.Context) (Stats, error) {
	if g.undecided && !g.closed {
		if err := g.checkIdle(); err != nil {
			return g.stats, base.OpError("gradient stats", err)
		}
		if err := g.side.catchUp(); err != nil { // the compute stream waits for the side stream, where the verdict is
			return g.stats, base.OpError("gradient stats", err)
		}
		skipped, err := g.transaction.skips(ctx) // the host waits for the device's verdict
		if err != nil {
			return g.stats, base.OpError("gradient stats", err)
		}
		g.stats.Skipped = skipped
		g.undecided = false
	}
	return g.stats, nil
}

// checkIdle returns an error while the communication worker has a step's buckets and the communicator.
func (g *Gradients) checkIdle() error {
	if g.step.begun && g.async != nil {
		return fmt.Errorf("%w: in the middle of a step, want after Wait", comm.ErrArgument)
	}
	return nil
}

// usable returns why no step can be made: g is closed, or an error stays, for good or until Wait ends the step.
func (g *Gradients) usable(op string) error {
	if g.closed {
		return base.OpError(op, base.ClosedError("the Gradients"))
	}
	return base.OpError(op, errors.Join(g.err, g.step.fault))
}

// runtime is the runtime that works on sparse buckets.
func (g *Gradients) runtime() runtime.Runtime {
	if g.side != nil {
		return g.side.rt
	}
	return g.rt
}

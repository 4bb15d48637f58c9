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

// Gradients averages the gradients of a model over the ranks, or adds them
// up, while the backward pass goes on.
//
// Gradients are put into buckets of one type each, in reverse order of
// registration, because a backward pass computes the last layer's gradient first.
// A bucket is reduced as soon as all its gradients, and all buckets before it,
// are ready: so all ranks reduce the same buckets in the same order, whatever the
// order in which their gradients become ready.
//
// A dense bucket is submitted in Ready and completed in Wait; meanwhile the
// communicator works on it if it has its own stream (then buckets and
// compute are ordered by events and the host never waits) or makes progress by
// itself. With streams its gradients are put together, in symmetric memory if
// there is such ([comm.Allocate]); otherwise all but the small ones are reduced
// where they are, as one group.
//
// What a sparse bucket sends is selected in Ready. Without streams the exchange is
// asynchronous: a communication worker, a goroutine of the Gradients, makes it while the
// backward pass goes on (with [sparse.Config].NoUndo, Ready does). With streams, a side
// stream selects, exchanges and merges each bucket after an event of the compute stream, if the
// runtime has such streams ([runtime.StreamForker]); otherwise the compute stream does. If an exchange
// has the host wait, as [sparse.Oktopk] does, the worker does it all, or with NoUndo, Ready.
//
// If any bucket is sparse, has a [Reducer], or clipping or detection of non-finite gradients is
// on, all buckets commit or roll back together, unless [sparse.Config].NoUndo is set: results are
// written in Wait, if all buckets have one and all gradients are finite. An error of Ready
// stays until Wait, which returns it too and ends the step: gradients and residuals
// are as before it then, bit for bit, on this rank, and the step can be repeated, or
// left out, with the same communicator or another one ([Gradients.Rebind]). An
// error while results are written stays for good.
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

	rt        runtime.Runtime
	meter     *metered.Communicator // counts what the ranks send; another one after Rebind
	lines     lines                 // meter, or with a Mesh the communicators that were split from it
	order     base.Order            // has meter's work and the compute stream wait for each other
	cfg       Config                // with its defaults
	op        comm.ReduceOp         // of dense buckets
	gradients []gradient            // in the order of registration
	roster    roster                // tells at the beginning of a step who has data; zero without Uneven and Weighted
	weights   weights               // what this rank's gradients stand for; zero without Weighted
	repeats   bool                  // what is held is of a reproducible step that was rolled back

	arrangement             // buckets, bucketOf, patterns, transaction, async, views and shards: see phase.go
	side        *sideStream // nil: sparse buckets are worked on where gradients are computed
	agreed      bool        // the ranks have compared what they reduce; false after Rebind

	step    step              // in flight, from the first Ready to the end of Wait: see phase.go
	spans   *base.Spans       // finds gradients of a step that share memory
	joining []*runtime.Tensor // instead of what is left out, in Join; nil outside of it
	steps   int               // complete ones
	results []*runtime.Tensor // what was given in the last of them; nil before the first
	stats   Stats             // of it; zero before the first
	open    bool              // the device alone knows whether it was skipped
	skips   repeats.Log       // of steps that were skipped, and of residuals that were lost
	err     error             // sticky; returned by every later call. nil: usable
	closed  bool

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

// Views returns with [Config].BucketViews the tensors in which a backward
// pass computes the gradients, in the order of registration, and nil otherwise. They
// have the shapes and types of the parameters, are aligned to their elements, start as
// zeros, and are valid until Close. After a Restore that makes other buckets, and after
// a [Gradients.Rebind] where steps are plain allreduces, ask again: there are others,
// and what these held is lost.
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

// BeforeCommit is [sparse.Reducer.BeforeCommit] for all buckets: f is called in Wait. Plain buckets are not rolled
// back. With [Config].Reproducible, all ranks have an f or none has.
func (g *Gradients) BeforeCommit(f func(ctx context.Context) error) {
	g.confirm = f
}

// OnStep makes g call f at the end of each step that completes, in Wait and Join, for metrics: with the [Stats] that
// the host has. If the device decides whether a step is skipped, only [Gradients.Stats] knows, which waits
// for it. OnStep(nil) ends the calls. Call OnStep between steps.
func (g *Gradients) OnStep(f func(Stats)) {
	g.onStep = f
}

// Result returns the average of gradient i in the last complete step: the tensor
// that was given or, if it was left out, a vector that is valid until the next
// step's Wait and Close. It is nil before the first step.
func (g *Gradients) Result(i int) *runtime.Tensor {
	return g.results[i]
}

// Stats returns what the last complete step did. Whether it was skipped may be known
// by the device only, which is waited for then, until ctx is done. In the middle of a
// step on which the Gradients's goroutine works, that is [comm.ErrArgument].
func (g *Gradients) Stats(ctx context.Context) (Stats, error) {
	if g.open && !g.closed {
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
		g.open = false
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

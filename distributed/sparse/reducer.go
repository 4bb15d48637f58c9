package sparse

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/runtime"
)

// Reducer averages one gradient tensor over the ranks, step after step, with
// one of the patterns. It keeps what is particular to that tensor: the
// residual, thresholds, partitions and scratch memory. Make one per tensor
// with [New]; for the buckets of a model, see package ddp.
//
// A Reducer belongs to one goroutine at a time, and so do the calls of its
// communicator during a step.
type Reducer struct {
	engine *engine.Reducer // makes the steps; never nil
}

// New prepares the reduction of a tensor of n elements in rt's memory.
// It does not communicate ([Auto] does in the first step). All ranks of c pass the
// same n and cfg.
//
// Errors:
//
//   - [comm.ErrArgument] if a field of cfg is out of range, or n is negative or above 2^31-1.
//   - [runtime.ErrUnsupported] if the runtime lacks [kernel.Kernels], or the kernels of the Values. Only the dense
//     pattern in F32 without clipping and detection of non-finite gradients needs no kernels.
//   - [comm.ErrDevice] if c does not reach rt's memory.
func New(rt runtime.Runtime, c comm.Communicator, n int, cfg Config) (*Reducer, error) {
	e, err := engine.New(rt, c, n, engine.Config(cfg))
	if err != nil {
		return nil, err
	}
	return &Reducer{engine: e}, nil
}

// AllReduce replaces t with (an approximation of) the average of all ranks' t, bit-identical on every rank. Elements
// for which no rank's entry reached the result are zero. t has the n elements that New was given, in any shape, and is
// F32, F16 or BF16 ([comm.ErrUnsupported] otherwise). Its runtime has the compute stream of New's runtime
// ([runtime.ErrDevice] otherwise). Unsent entries are kept, in F32, and added to the next step's gradient. The result
// is ready as [distributed.AllReduce]'s is.
//
// A wrong argument is an error before anything happens. A step is a transaction: any error rolls it back on this rank.
// The gradient in t and the residual are then as before, bit for bit, and the step does not count. So the same call
// repeats it, with the same communicator unless that is aborted, or with another one ([Reducer.Rebind]). The exception
// is an error of the runtime itself during the rollback, or after the result has overwritten the gradient in t: it is
// permanent, and later calls return it. Every error of a step with [Config].NoUndo is permanent, too, and leaves t's
// content undefined.
//
// The other ranks wait for this one after an error, until their contexts end or this rank closes its communicator,
// which is [comm.ErrPeerFailed] on them: so close it unless all ranks have the error. A rank that already had the whole
// result has completed the step; [Stats].Step shows this. A context that has ended before the step ([comm.ErrCanceled],
// [comm.ErrTimeout]) is an error before anything happens, like a wrong argument.
//
// Before the first step with a communicator the ranks compare the length, the type, the configuration, the step of a
// [Schedule] that is not over, and the version of this module, by one element of each rank. Any difference is
// [comm.ErrMismatch] on all of them, and the error names it. Lengths and indices from another rank that are impossible
// for n elements are [comm.ErrMismatch], too. Such indices are left out of the result, and every later step returns the
// error. On a device with streams, the first step that reads numbers of the device returns it, as each 256th step that
// is not captured does. oktopk reads some numbers one step later: that step returns the error, or Stats, State or
// ScaleResidual before it.
func (r *Reducer) AllReduce(ctx context.Context, t *runtime.Tensor) error {
	return r.engine.AllReduce(ctx, t)
}

// Stats returns the statistics of the last step. It waits for numbers on the device until ctx is done. After a rollback
// it returns the statistics of the step before, in which selected counts are 0 unless Stats was called for that step.
func (r *Reducer) Stats(ctx context.Context) (Stats, error) {
	stats, err := r.engine.Stats(ctx)
	return Stats(stats), err
}

// BeforeCommit makes each AllReduce call f when this rank has the result, before anything is written that cannot be
// rolled back. The host waits for the result. An error of f rolls the step back, so the ranks can agree in f that all
// of them commit. A program that sets f reports what is lost with ranks that [Reducer.Rebind] leaves out.
// BeforeCommit(nil) ends the calls.
func (r *Reducer) BeforeCommit(f func(ctx context.Context) error) {
	r.engine.BeforeCommit(f)
}

// Residual returns this rank's residual as a tensor of n F32 elements, to inspect it, or to discard it by filling it
// with zeros. It is a view, valid until the next step, which moves the residual to another address unless a step has
// been captured in a graph ([Config].NoUndo: the address stays). Residual returns [comm.ErrUnsupported] for the dense
// pattern in F32, unless [Auto] has chosen it, and for Auto before it has chosen.
func (r *Reducer) Residual() (*runtime.Tensor, error) {
	return r.engine.Residual()
}

// ScaleResidual multiplies the residual by a finite, non-negative factor. Call it when a loss scale or learning rate
// that gradients contain changes by that factor. A reused threshold stays, and is recomputed if it no longer fits.
// ScaleResidual does not communicate; all ranks call it. The dense pattern has nothing to scale.
func (r *Reducer) ScaleResidual(factor float64) error {
	return r.engine.ScaleResidual(factor)
}

// State returns what a [Reducer] with the same configuration needs to go on from
// here, bit for bit: residual, number of the step, thresholds and partitions. It
// does not communicate, and waits for the device until ctx is done. Every rank
// saves its own, between the same two steps.
func (r *Reducer) State(ctx context.Context) ([]byte, error) {
	return r.engine.State(ctx)
}

// SharedState returns the part of [Reducer.State] that is the same on all ranks. A joining rank restores it, in a world
// of the same size, and continues where the others are, with an empty residual.
func (r *Reducer) SharedState(ctx context.Context) ([]byte, error) {
	return r.engine.SharedState(ctx)
}

// Restore returns r to the state that [Reducer.State] returned: the next step is the one that followed, with the same
// bits. It does not communicate; all ranks restore. The choice of [Auto] is restored, not measured again. If the world
// size has changed, pass the states that [RestoreRanks] names. Residuals are then added in the order of the states,
// which preserves their sum over the ranks. Velocities ([Config].Momentum) are distributed so that their mean is
// preserved. Thresholds and partitions start anew. Restore waits for the device, until ctx is done.
//
// Bytes that are not such a state, are damaged or have another version are [comm.ErrArgument]. A state of another
// configuration, tensor length or rank is [comm.ErrMismatch]. Both leave r unchanged. An error of the runtime while the
// residual is written is permanent.
func (r *Reducer) Restore(ctx context.Context, states ...[]byte) error {
	return r.engine.Restore(ctx, states...)
}

// RestoreRanks returns the ranks whose states rank, in a world of size ranks, passes to [Reducer.Restore], after a run
// of saved ranks. In a world of the same size, that is its own. In a smaller world, each state goes to one rank. In a
// larger world, each new rank restores the shared part of a state that another rank restores as well.
func RestoreRanks(saved, size, rank int) []int {
	return engine.RestoreRanks(saved, size, rank)
}

// Rebind moves r to another communicator, such as a sub-communicator of the ranks that remain after a failure. It does
// not communicate; all ranks of c call it. The residual stays as it is, averages are over the ranks of c, and
// thresholds and partitions start anew. The residual of a rank that is not part of c is lost. If c has fewer ranks, its
// rank 0 logs how many are gone. If only some ranks have completed the failed step ([Stats].Step), they are a step
// apart from then on. Under a [Schedule] that is not over, the next step is then [comm.ErrMismatch] on all of them
// until they restore the states of one step ([Reducer.Restore]).
//
// If a step has failed on the old communicator, close that first: Rebind waits for it as [Reducer.Close] does. After an
// error of that wait, or if c is nil or does not reach the memory, r stays with the old communicator. An error of the
// runtime is permanent.
func (r *Reducer) Rebind(c comm.Communicator) error {
	return r.engine.Rebind(c)
}

// Close frees the memory. The communicator and tensors stay as they are.
// Closing twice is fine. Where the communicator has symmetric memory
// ([comm.Allocate]), all ranks close together; after an error that memory is left
// to the communicator's Close.
//
// If a step has failed in the middle of an exchange, Close waits for the communicator, at most 5 seconds. After an
// error of that wait the memory is not freed, because the communicator may still write it: close the communicator then,
// and after it the Reducer again.
func (r *Reducer) Close() error {
	return r.engine.Close()
}

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
// Errors: [comm.ErrArgument] for a field of cfg that is out of range or a
// negative n or one above 2^31-1; [runtime.ErrUnsupported] for a runtime
// without [kernel.Kernels], which only the dense pattern in F32 without clipping and detection of
// non-finite gradients does not need, or without those of the Values; [comm.ErrDevice] if c does not reach rt's memory.
func New(rt runtime.Runtime, c comm.Communicator, n int, cfg Config) (*Reducer, error) {
	e, err := engine.New(rt, c, n, engine.Config(cfg))
	if err != nil {
		return nil, err
	}
	return &Reducer{engine: e}, nil
}

// AllReduce replaces t by (an approximation of) the average of all ranks' t:
// the same bits on every rank, zero where no rank's entry made it into the
// result. t has the n elements that New was told, in any shape; F32, F16
// or BF16 ([comm.ErrUnsupported] otherwise), and its runtime has the compute
// stream of the one that New was told ([runtime.ErrDevice] otherwise). What
// was not sent is kept, in F32, and added to the next step's gradient. The result
// is ready as [distributed.AllReduce]'s is.
//
// A wrong argument is an error before anything happened. A step is a transaction:
// after any error nothing has happened on this rank. t holds the gradient that was
// passed, and the residual what it held before, both bit for bit, and the step does
// not count. So the same call repeats it, with the
// same communicator unless that is aborted, or with another one ([Reducer.Rebind]).
// The exception is an error of the runtime itself while that is restored, or when the
// result has been written to t, which has lost the gradient then: it
// stays, and later calls return it. So does every error of a step with
// [Config].NoUndo: t's content is undefined then.
//
// The other ranks wait for this one after an error, until their contexts end or
// this rank closes its communicator, which is [comm.ErrPeerFailed] on them: so
// close it unless all ranks have the error. A rank that had got all of the result
// by then has completed the step; [Stats].Step tells. A context that is over
// before the step ([comm.ErrCanceled], [comm.ErrTimeout]) is found before anything
// happens, as a wrong argument is.
//
// Before the first step with a communicator the ranks compare the length, the type, the
// configuration, the step of a [Schedule] that is not over, and the version of this
// module, by one element of each rank: if they differ, that is [comm.ErrMismatch] on
// all of them, and names the difference. Lengths that another rank announces and that
// no tensor of n elements has are [comm.ErrMismatch], and so are indices: those are
// left out of the result, and every step that follows has the error. On a device with
// streams it is the first step that reads numbers of the device, and each 256th that is
// not captured does. What oktopk reads in the step after is an error of
// that, or of Stats, State and ScaleResidual before it.
func (r *Reducer) AllReduce(ctx context.Context, t *runtime.Tensor) error {
	return r.engine.AllReduce(ctx, t)
}

// Stats returns what the last step did. Numbers that are on the device are
// waited for, until ctx is done. After a step that was rolled back they are those of the step
// before, in which what was selected is 0 unless Stats had been asked for it by then.
func (r *Reducer) Stats(ctx context.Context) (Stats, error) {
	stats, err := r.engine.Stats(ctx)
	return Stats(stats), err
}

// BeforeCommit has f called in each AllReduce when this rank has the result, for which the host waits, and before
// anything is written that cannot be rolled back: with the error of f the step is rolled back. It is where ranks agree
// that all of them commit. The program that sets it reports what is lost with ranks that [Reducer.Rebind] leaves out.
// nil ends that.
func (r *Reducer) BeforeCommit(f func(ctx context.Context) error) {
	r.engine.BeforeCommit(f)
}

// Residual returns this rank's residual as a tensor of n F32 elements, for
// inspection, and to be discarded (filled with zeros). It is a view,
// valid until the next step: that leaves the residual at another address, unless
// a step has been captured in a graph ([Config].NoUndo: the address stays). The
// dense pattern in F32 has none, unless [Auto] has chosen it, and Auto has none before it has chosen. These are
// [comm.ErrUnsupported].
func (r *Reducer) Residual() (*runtime.Tensor, error) {
	return r.engine.Residual()
}

// ScaleResidual multiplies the residual by a finite factor that is not negative: when a loss scale or learning rate
// that gradients contain changes by it, the residual changes alike. A threshold that is reused stays, and is found
// anew if it does not serve any more. It does not communicate; all ranks do it. The dense pattern has nothing to scale.
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

// SharedState returns the part of [Reducer.State] that ranks have alike. A rank that joins them restores it, in
// a world of the same size: it goes on where they are, with an empty residual.
func (r *Reducer) SharedState(ctx context.Context) ([]byte, error) {
	return r.engine.SharedState(ctx)
}

// Restore makes r what it was when [Reducer.State] returned its state: the next step
// is the one that followed, with the same bits. It does not communicate; all
// ranks restore. What [Auto] had chosen is restored, and not measured again. If the world
// size differs from that in the states (pass the states that [RestoreRanks] names), residuals
// are added in their order, so that their sum over the ranks stays, velocities
// ([Config].Momentum) are shared so that their mean does, and thresholds and partitions start
// anew. Restore waits for the device, until ctx is done.
//
// Bytes that are no such state, are damaged or of another version are [comm.ErrArgument];
// a state of another configuration, tensor length or rank is [comm.ErrMismatch]. r is as
// it was then. An error of the runtime while the residual is written stays.
func (r *Reducer) Restore(ctx context.Context, states ...[]byte) error {
	return r.engine.Restore(ctx, states...)
}

// RestoreRanks returns the ranks of a run of saved ranks whose states a rank of
// size passes to [Reducer.Restore]. In the same world that is its own. In a smaller one each
// state goes to one rank. In a larger one each rank that was not there before has one
// that another rank has as well, and takes of it what ranks share.
func RestoreRanks(saved, size, rank int) []int {
	return engine.RestoreRanks(saved, size, rank)
}

// Rebind moves r to another communicator, such as a sub-communicator of the ranks that are left after
// one has failed. It does not communicate; all ranks of c do it. The residual
// stays as it is, averages are over the ranks of c, and thresholds and partitions
// start anew. What the residual of a rank held that is not part of c is lost with
// that rank; where c has fewer ranks, its rank 0 logs how many went. Ranks of which only
// some have completed the step that failed ([Stats].Step) are a step apart from then
// on: under a [Schedule] that is not over, the next step is [comm.ErrMismatch] on all of
// them until they have restored one step's states ([Reducer.Restore]).
//
// If a step has failed on the old communicator, Rebind waits for that as
// [Reducer.Close] does: close it first. After an error of that wait, or of a
// communicator that is nil or does not reach the memory, r is still with the old
// one; an error of the runtime stays.
func (r *Reducer) Rebind(c comm.Communicator) error {
	return r.engine.Rebind(c)
}

// Close frees the memory. The communicator and tensors stay as they are.
// Closing twice is fine. Where the communicator has symmetric memory
// ([comm.Allocate]), all ranks close together; after an error that memory is left
// to the communicator's Close.
//
// If a step has failed in the middle of an exchange, Close waits for the
// communicator, at most 5 seconds. After an error of that wait the memory is not
// given back, because the communicator may still write it: close the communicator
// then, and after it the Reducer again.
func (r *Reducer) Close() error {
	return r.engine.Close()
}

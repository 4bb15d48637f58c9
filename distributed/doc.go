// Package distributed is the safe, tensor-level layer on top of packages
// runtime and comm: collectives on tensors, sparse allreduce with error
// feedback, gradient buckets that overlap with the backward pass, and meshes
// of ranks with named dimensions.
//
// # Dense
//
// [AllReduce], [Broadcast] and the other functions check what the communicator
// cannot see from an address (element types, shapes, contiguity, freed
// tensors, memory that the backend does not reach) and order communication
// against the device: if the communicator has a stream of its own
// ([comm.StreamOrder]) and so has the runtime, by events, without blocking
// the host; otherwise by waiting.
//
// # Completion
//
// When a function of this package returns, its result is ready for work that is
// submitted to the tensor's runtime from then on. Without streams that includes
// the host. With streams the host may be ahead of the device, and should call
// the communicator's Sync(ctx) before it reads the result, or anything computed
// from it: Sync ends when ctx does, and when a peer has failed. A copy from the
// device ([runtime.ToSlice], [runtime.CopyOut]) waits for the streams as well, but
// for as long as they take: behind a collective that a dead peer never joins,
// for ever.
//
// # Sparse
//
// [Sparse] reduces one gradient tensor per step and sends only its largest
// entries. Its patterns are not programs of their own but a grid: a selector
// picks entries of gradient + residual, an exchange combines the picks of all
// ranks, and error feedback keeps in the residual what did not go. [Patterns]
// lists the named combinations, and [Auto] is the fastest of them here;
// docs/sparse.md describes them, their volume and how they differ from the
// published code.
//
// What holds for each of them:
//
//   - The result is the average over the ranks, bit-identical on every rank.
//   - Nothing gets lost: the sum over the ranks of gradient + old residual is
//     P times the result plus the sum of the new residuals, up to rounding.
//   - Indices travel as 32-bit integers. A tensor has at most 2^31-1 elements.
//   - NaN and infinities rank above all numbers, so they are picked first: if
//     any rank's gradient has one, every rank finds out in that step (with [OverflowPass],
//     where a step of [Oktopk] has no room for it, in a later one). What follows is the
//     same on all of them ([OverflowPolicy]).
//   - A step is a transaction, unless Config.NoUndo is set: after an error, gradient
//     and residual are as before it, bit for bit, and the step can be repeated.
//
// [Levels] is a Sparse for ranks whose links differ: dense along the inner
// dimensions of a [Mesh], within a host, and sparse along the outer one. Its steps
// are no transactions.
//
// # Gradients of a model
//
// [GradientSync] puts many tensors into buckets and reduces each as soon as
// the backward pass has filled it; gradients of several passes are reduced once
// ([GradientSync.Accumulate]), and ranks may run out of data at different steps
// ([GradientSync.Join]). [Mesh] names the dimensions of a world (data, tensor,
// pipeline, ...) and has a communicator for each.
//
// # Around a training loop
//
// [BroadcastAll] gives all ranks the same parameters and the same state of an
// optimizer, [Sampler] says which samples are a rank's, [AverageMetrics] weighs
// metrics by them, and [BroadcastBytes], [GatherBytes] and [AllGatherBytes] move
// what is no tensor. docs/training.md puts it together.
package distributed

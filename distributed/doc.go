// Package distributed runs collectives on tensors and bytes, arranges ranks in
// meshes with named dimensions, and shares samples and metrics between the ranks of a
// training loop. Package ddp averages the gradients of a model while the backward pass
// goes on, and package sparse sends only the largest entries of a gradient.
//
// # Dense
//
// [AllReduce], [Broadcast] and the other functions check what the communicator
// cannot see from an address (element types, shapes, contiguity, freed
// tensors, memory that the backend does not reach) and order communication
// against the device: if the communicator has its own stream
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
// device ([runtime.ToSlice], [runtime.CopyOut]) waits for the streams without
// a limit: after a collective that a dead peer never joins, forever. The same holds
// for packages sparse and ddp.
//
// # Around a training loop
//
// [Mesh] names the dimensions of a world (data, tensor, pipeline, ...) and has a
// communicator for each. [BroadcastAll] gives all ranks the same parameters and the same
// state of an optimizer, [Sampler] says which samples are a rank's, [AverageMetrics] weighs
// metrics by them, and [BroadcastBytes], [ScatterBytes], [GatherBytes] and
// [AllGatherBytes] move data that is not a tensor. docs/training.md puts it together.
package distributed

// Package distributed runs collectives on tensors and bytes, arranges ranks in meshes with named dimensions, and shares
// samples and metrics between the ranks of a training loop. Package ddp averages the gradients of a model during the
// backward pass, and package sparse sends only the largest entries of a gradient.
//
// # Dense
//
// [AllReduce], [Broadcast] and the other functions check properties that the communicator cannot see from an address:
// element types, shapes, contiguity, freed tensors, and memory that the backend does not reach. They also order
// communication against the device. If the communicator ([comm.StreamOrder]) and the runtime each have a stream, they
// use events, without blocking the host; otherwise they wait.
//
// # Completion
//
// When a function of this package returns, its result is ready for work submitted to the tensor's runtime afterwards.
// Without streams that includes the host. With streams the host may run ahead of the device. It should call the
// communicator's Sync(ctx) before it reads the result, or anything computed from it: Sync also returns when ctx ends or
// a peer has failed. A copy from the device ([runtime.ToSlice], [runtime.CopyOut]) waits for the streams without a
// limit. After a collective that a dead peer never joins, it waits forever. The same holds for packages sparse and ddp.
//
// # Around a training loop
//
// [Mesh] names the dimensions of a world (data, tensor, pipeline, ...) and has a communicator for each. [BroadcastAll]
// gives all ranks the same parameters and optimizer state, [Sampler] assigns samples to ranks, [AverageMetrics] weights
// metrics by the number of samples, and [BroadcastBytes], [ScatterBytes], [GatherBytes] and [AllGatherBytes] move data
// that is not a tensor. docs/training.md combines them.
package distributed

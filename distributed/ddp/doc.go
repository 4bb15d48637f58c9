// Package ddp averages the gradients of a model over the ranks while the backward
// pass goes on: distributed data parallel training.
//
// [Gradients] puts the tensors into buckets and reduces each bucket as soon as
// the backward pass has filled it. Gradients of several passes are reduced once
// ([Gradients.Accumulate]), and ranks may run out of data at different steps
// ([Gradients.Join]). If any bucket is sparse, or clipping or detection of non-finite
// gradients is on, all buckets commit or roll back together.
package ddp

// Package ddp implements distributed data-parallel training: it averages the gradients of a model over the ranks during
// the backward pass.
//
//	sync, err := ddp.New(ctx, rt, c, parameters, ddp.Config{})
//	…
//	for i := len(parameters) - 1; i >= 0; i-- { // the backward pass
//		…
//		err = sync.Ready(ctx, i, gradient) // its bucket is reduced as soon as it is full
//	}
//	err = sync.Wait(ctx) // sync.Result(i) is the average
//
// A program whose gradients are all there after the backward pass calls [Gradients.ReduceAll] instead of Ready and
// Wait. Gradients of several passes are reduced once ([Gradients.Accumulate]), and ranks may run out of data at
// different steps ([Gradients.Join]). If any bucket is sparse, or clipping or detection of non-finite gradients is on,
// all buckets commit or roll back together.
package ddp

// How it is written, by task:
//
//   - config.go: what a program sets; lines.go: communicators of a mesh; phase.go: the state of a step, of
//     buckets, and of gradients; gradients.go: [Gradients].
//   - reducer.go: what reduces a bucket: a program's [Reducer], and what all of them have in common. They are
//     plain.go: an allreduce; custom.go: a program's; shard.go: a reduce-scatter that leaves each rank a
//     [Shard]; mesh.go: any of them between hosts, and densely within them; and the engine of package sparse.
//   - transaction.go: the verdict that buckets share; clip.go: the norm of all of them.
//   - worker.go: asynchronous exchanges; side_stream.go: work beside the compute stream.
//   - buckets.go: which gradients are in which bucket, and where they lie; new.go: what begins and ends with a
//     [Gradients]; step.go: a step, from Ready to Wait; agree.go: what ranks compare first.
//   - accumulate.go, join.go: one option each.
//   - state.go: saved states; rebind.go: another communicator, as after the loss of a rank.

// Package sparse is sparse allreduce with error feedback: a step averages one
// gradient tensor over the ranks and sends only its largest entries.
//
// The patterns are not programs but a grid: a selector chooses entries of gradient +
// residual, an exchange combines the lists of all ranks, a codec says how they travel ([Values]), and error
// feedback keeps in the residual the entries that were not sent, and what rounding lost. [Patterns] lists the named combinations, and [Auto] is
// the fastest of them here; docs/sparse.md describes them, their volume and how they
// differ from the published code. For the gradients of a whole model, see package ddp.
//
// For each pattern the following holds:
//
//   - The result is the average over the ranks, bit-identical on every rank.
//   - Nothing gets lost: the sum over the ranks of gradient + old residual is
//     P times the result plus the sum of the new residuals, up to rounding.
//   - Indices are 32-bit integers. A tensor has at most 2^31-1 elements.
//   - NaN and infinities rank above all numbers, so they are selected first: if
//     any rank's gradient has one, every rank finds out in that step (with [PassNonFinite],
//     where a step of [Oktopk] has no room for it, in a later one). What follows is the
//     same on all ranks ([NonFinitePolicy]).
//   - A step is a transaction, unless Config.NoUndo is set: after an error, gradient
//     and residual are as before it, bit for bit, and the step can be repeated.
//
// [Hierarchical] is for ranks whose links differ: dense along the inner
// dimensions of a [distributed.Mesh], within a host, and sparse along the outer one. Its
// steps are not transactions.
//
// # How it is written
//
// Files use only what files before them have, as far as they can:
//
//   - config.go: what a program sets; pattern.go: the grid; values.go: names of codecs; result.go: results as lists.
//   - engine.go: one rank's residual, kernels and communicator, with errors that stay; rollback.go: what rolls a step back;
//     lists.go: lists; wire.go: how they travel, rounded where they are; numbers.go: the few numbers on the
//     device, and when the host reads them.
//   - selector.go chooses entries; momentum.go and clip.go are what happens to a gradient before.
//   - allgather.go, gtopk.go, partitions.go and oktopk*.go are the exchanges (oktopk_threshold.go: when and how oktopk
//     finds its thresholds), quantized.go is that of dense steps whose values are rounded.
//   - step.go: a step, from Select to Commit or RollBack, with what rolls it back;
//     nonfinite.go: the verdict on one whose gradient is not finite;
//     reducer.go: [Reducer], whose AllReduce is such a step; agree.go: what ranks compare first.
//   - state.go: saved states; auto.go: [Auto]; hierarchical.go: [Hierarchical].
package sparse

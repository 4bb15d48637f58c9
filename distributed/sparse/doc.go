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
// # How it is written
//
// Files use only what files before them have, as far as they can:
//
//   - values.go and pattern.go: names, and what selectors and exchanges are; stats.go: what a step tells;
//     phase.go: the state of a step; config.go: what a program sets.
//   - engine.go: one rank's residual, kernels and communicator, with errors that stay; numbers.go: the few numbers on the
//     device, and when the host reads them; lists.go: lists; wire.go: how they travel, rounded where they are.
//   - selector.go chooses entries; momentum.go and clip.go are what happens to a gradient before.
//   - allgather.go, gtopk.go, partitions.go and oktopk*.go are the exchanges (oktopk_budget.go: what it may send;
//     oktopk_threshold.go: when and how it finds its thresholds), quantized.go is that of dense steps whose values are rounded;
//     grid.go: which pattern is which selector and exchange.
//   - reducer.go: [Reducer]; agree.go: what ranks compare first; nonfinite.go: the verdict on a step whose gradient is not
//     finite; rollback.go: what rolls one back; step.go: a step, from Select to Commit or RollBack, and AllReduce, which is one.
//   - auto.go: [Auto]; result.go: results as lists; state.go: saved states; rebind.go: other ranks.
package sparse

// Package engine makes the steps of sparse allreduce, for packages sparse and ddp, which document what users see. A
// [Reducer] makes a step at once ([Reducer.AllReduce]), or in parts, for a caller that reduces several tensors in one
// transaction: [Reducer.Select], [Reducer.Exchange] and [Reducer.Complete], then [Reducer.Commit] or
// [Reducer.RollBack].
//
// # How it is written
//
// Files use only what files before them have, as far as they can:
//
//   - values.go and pattern.go: names, and what selectors and exchanges are; stats.go: what a step tells;
//     phase.go: the state of a step; config.go: what a program sets, and the settings that follow.
//   - engine.go: one rank's residual, kernels and communicator, with errors that stay; numbers.go: the few
//     numbers on the device, and when the host reads them; lists.go: lists; wire.go: how they travel, rounded
//     where they are.
//   - selector.go chooses entries, whose kernels subtract them from the residual (engine.source); momentum.go and
//     clip.go are what happens to a gradient before.
//   - allgather.go, gtopk.go, partitions.go and oktopk*.go are the exchanges (oktopk_budget.go: what it may
//     send; oktopk_threshold.go: when and how it finds its thresholds), quantized.go has the exchange of dense steps
//     whose values are rounded; grid.go: which pattern is which selector and exchange.
//   - reducer.go: [Reducer]; agree.go: what ranks compare first; nonfinite.go: the verdict on a step whose
//     gradient is not finite; rollback.go: what rolls one back; step.go: a step, from Select to Commit or
//     RollBack, and AllReduce, which is one.
//   - auto.go: [Auto]; result.go: results as lists; state.go: saved states; rebind.go: other ranks.
package engine

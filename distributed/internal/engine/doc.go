// Package engine implements the steps of sparse allreduce, for packages sparse and ddp, which document the users'
// view. A [Reducer] makes a step at once ([Reducer.AllReduce]), or in parts, for a caller that reduces several tensors
// in one transaction: [Reducer.Select], [Reducer.Exchange] and [Reducer.Complete], then [Reducer.Commit] or
// [Reducer.RollBack].
//
// # Files
//
// Files depend on earlier files of this list, as far as possible:
//
//   - values.go, pattern.go: names, selectors and exchanges; stats.go: statistics of a step; phase.go: its state;
//     config.go: configuration and settings
//   - engine.go: one rank's residual, kernels and communicator, with errors that stay; numbers.go: the few numbers on
//     the device, and when the host reads them; lists.go: lists; wire.go: their encoding
//   - selector.go: selection of entries, whose kernels subtract them from the residual (engine.source); momentum.go,
//     clip.go: changes of a gradient before that
//   - allgather.go, gtopk.go, partitions.go, oktopk*.go: the exchanges (oktopk_budget.go: how much it may send;
//     oktopk_threshold.go: when and how it finds its thresholds); quantized.go: dense steps with rounded values;
//     grid.go: the selector and exchange of each pattern
//   - reducer.go: [Reducer]; agree.go: terms that ranks compare first; nonfinite.go: the verdict on a step whose
//     gradient is not finite; rollback.go: rolling back; step.go: a step from Select to Commit or RollBack, and
//     AllReduce
//   - auto.go: [Auto]; result.go: results as lists; state.go: saved states; rebind.go: other ranks
package engine

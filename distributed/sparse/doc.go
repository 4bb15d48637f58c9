// Package sparse averages a gradient over the ranks by sending only its largest
// entries: sparse allreduce with error feedback, which sends the others in later steps.
//
// The parts of a pattern can be combined: a selector chooses entries of gradient + residual, an exchange combines the
// lists of all ranks, a codec encodes them, and error feedback keeps unsent entries and rounding errors in the
// residual. The patterns are named combinations, and [Auto] is the fastest of them here. docs/sparse.md describes them,
// their volume and how they differ from the published code. For the gradients of a whole model, see package ddp.
//
// For each pattern the following holds:
//
//   - The result is the average over the ranks, bit-identical on every rank.
//   - Nothing gets lost: the sum over the ranks of gradient + old residual is
//     P times the result plus the sum of the new residuals, up to rounding.
//   - Indices are 32-bit integers. A tensor has at most 2^31-1 elements.
//   - NaN and infinities rank above all numbers, so they are selected first: if
//     any rank's gradient has one, every rank finds out in that step (with [PassNonFinite],
//     where a step of [Oktopk] has no room for it, in a later one). The consequence
//     is the same on all ranks ([NonFinitePolicy]).
//   - A step is a transaction, unless Config.NoUndo is set: after an error, gradient
//     and residual are as before it, bit for bit, and the step can be repeated.
//
// Package internal/engine implements the steps, for package ddp as well.
package sparse

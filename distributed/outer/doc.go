// Package outer trains with few exchanges: each rank makes many steps with its own
// optimizer, and then all ranks average how far their parameters have moved.
//
// A round is a window of H steps. At its end each rank takes the difference of the common
// parameters and its own (the outer gradient), the ranks average that by any pattern of
// package sparse or [ddp.Reducer] of the program, an outer optimizer moves the common
// parameters, and all ranks continue from there. So the ranks exchange H times less often than
// data-parallel training does, and what they send can also be compressed a hundredfold:
// docs/slow-links.md says when that pays, and which H and rates to start with.
//
// Sources: DiLoCo (Douillard et al., 2023, https://arxiv.org/abs/2311.08105); fragments that
// take turns, arrive later and are mixed (Streaming DiLoCo, Douillard et al., 2025,
// https://arxiv.org/abs/2501.18512); error feedback with decay before a chunked top-k
// (SparseLoCo, Sarfi et al., 2025, https://arxiv.org/abs/2508.15706).
//
// # How it is written
//
//   - config.go: what a program sets; loop.go: [Loop], a step, and when fragments are sent
//     and arrive; fragment.go: the arithmetic of one; state.go: saved states, other
//     communicators, the hash of the common parameters.
package outer

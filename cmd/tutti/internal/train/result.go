package train

import (
	"fmt"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
)

// Result is the outcome of training with one pattern. Its JSON form is one line of `tutti train --json`.
type Result struct {
	Pattern string `json:"pattern"`
	// Chosen is the pattern that auto chose; "" for other patterns.
	Chosen string `json:"chosen,omitempty"`
	// Values is the codec of the values that are sent.
	Values  string `json:"values"`
	Backend string `json:"backend"`
	Network string `json:"network,omitempty"` // emulated, "" otherwise
	Device  string `json:"device"`            // of rank 0, which exchanges gradients there
	Ranks   int    `json:"ranks"`
	// Reproducible is the number of microbatches in a step whose weights are the same for any number of ranks; 0: the
	// weights depend on that number.
	Reproducible int `json:"reproducible,omitempty"`
	// Outer is the window of an outer loop, in steps; 0: every step exchanges.
	Outer int `json:"outer,omitempty"`
	// Rounds is the number of exchanges.
	Rounds int `json:"rounds"`
	// Density is the requested density; 1 for the dense pattern.
	Density float64 `json:"density"`
	// Hosts is the number of hosts that the pattern connects; 0: it connects all ranks.
	Hosts int `json:"hosts,omitempty"`
	// Accuracy on the test examples at the end, in percent.
	Accuracy float64 `json:"accuracy"`
	// Loss is the mean over the test examples at the end, in nats.
	Loss float64 `json:"loss"`
	// SentElements and SentBytes are what a rank sends in a step to exchange the gradient: the mean over ranks and
	// steps, as package metered counts. With Hosts, only traffic to other hosts counts.
	SentElements float64 `json:"sent_elements_per_rank_step"`
	SentBytes    float64 `json:"sent_bytes_per_rank_step"`
	// RatioToDense is SentBytes divided by the bytes of a dense allreduce.
	RatioToDense float64 `json:"ratio_to_dense"`
	// CommSeconds is the time of the exchange of gradients, averaged over ranks. It includes the wait for other ranks
	// but not the selection of entries.
	CommSeconds float64 `json:"comm_s"`
	// TotalSeconds is the training time without the tests.
	TotalSeconds float64 `json:"total_s"`
	// Target is the requested accuracy in percent. TargetSeconds is the time of the first test that reached it, and
	// TargetStep the number of steps by then; both are nil if no test did.
	Target        float64  `json:"target,omitempty"`
	TargetSeconds *float64 `json:"target_s,omitempty"`
	TargetStep    *int     `json:"target_step,omitempty"`
	// TargetRounds and TargetSentBytes are the exchanges and the bytes sent by a rank up to that test; nil if no test
	// reached the target.
	TargetRounds    *int     `json:"target_rounds,omitempty"`
	TargetSentBytes *float64 `json:"target_sent_bytes_per_rank,omitempty"`

	// Hash is the 64-bit FNV-1a hash of the final weights, which are the same on all ranks.
	Hash string `json:"hash"`
	// Tests are the accuracies during the training. The last one is measured at its end.
	Tests []Test `json:"tests"`
	// Curve has a point for every step.
	Curve []Point `json:"-"`
}

// Name names the pattern, auto's choice, the codec of the values unless it is f32, and the window of an outer loop.
func (r Result) Name() string {
	name := backend.PatternName(r.Pattern, r.Chosen, r.Values)
	if r.Outer > 0 {
		name += fmt.Sprintf(", every %d", r.Outer)
	}
	return name
}

// Point is the state after a step.
type Point struct {
	// SentBytes is the number of bytes sent by a rank since the start, averaged over ranks.
	SentBytes float64
	// Seconds since the start, without tests.
	Seconds float64
	// Loss is the mean over the step's examples, before the update.
	Loss float64
}

// Test is a measurement of the accuracy.
type Test struct {
	// Step is the number of steps before the test.
	Step int `json:"step"`
	// Seconds since the start, without tests.
	Seconds float64 `json:"s"`
	// SentBytes is the number of bytes sent by a rank since the start, averaged over ranks.
	SentBytes float64 `json:"sent_bytes"`
	// Accuracy on the test examples, in percent.
	Accuracy float64 `json:"accuracy"`
	// Loss is the mean over the test examples, in nats.
	Loss float64 `json:"loss"`

	rounds int // until then
}

// Observer receives the progress on rank 0.
type Observer interface {
	// Step is called after each step of a pattern; steps is their number.
	Step(name string, step, steps int)
	// Finished is called after each pattern.
	Finished(r Result)
}

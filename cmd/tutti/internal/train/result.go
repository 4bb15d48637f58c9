package train

import (
	"fmt"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
)

// Result is what training with one pattern gave. The JSON form is one line of
// `tutti train --json`.
type Result struct {
	Pattern string `json:"pattern"`
	// Chosen is the pattern that auto is here, "" for others.
	Chosen string `json:"chosen,omitempty"`
	// Values is as what values travel.
	Values  string `json:"values"`
	Backend string `json:"backend"`
	Network string `json:"network,omitempty"` // an emulated one
	Device  string `json:"device"`            // rank 0's, on which gradients are exchanged
	Ranks   int    `json:"ranks"`
	// Reproducible is how many microbatches a step has, whose gradients give the same weights for any number of
	// ranks; 0: it depends.
	Reproducible int `json:"reproducible,omitempty"`
	// Outer is the window of an outer loop, in steps; 0: every step exchanges.
	Outer int `json:"outer,omitempty"`
	// Rounds is how often the ranks exchanged.
	Rounds int `json:"rounds"`
	// Density that was asked for; the dense pattern has 1.
	Density float64 `json:"density"`
	// Hosts between which the pattern is; 0: it is between all ranks.
	Hosts int `json:"hosts,omitempty"`
	// Accuracy on the test examples at the end, in percent.
	Accuracy float64 `json:"accuracy"`
	// Loss is the mean over the test examples at the end, in nats.
	Loss float64 `json:"loss"`
	// SentElements and SentBytes are what a rank sends in a step to exchange
	// the gradient: the mean over ranks and steps, as package metered counts; with Hosts
	// only to other hosts.
	SentElements float64 `json:"sent_elements_per_rank_step"`
	SentBytes    float64 `json:"sent_bytes_per_rank_step"`
	// RatioToDense is SentBytes over what a dense allreduce sends.
	RatioToDense float64 `json:"ratio_to_dense"`
	// CommSeconds is the time in the exchange of gradients, waiting for other
	// ranks included, without the selection of entries: the mean over ranks.
	CommSeconds float64 `json:"comm_s"`
	// TotalSeconds is the time of the training, without the tests.
	TotalSeconds float64 `json:"total_s"`
	// Target is the accuracy that was asked for, in percent, and TargetSeconds the
	// time of the first test that reached it, TargetStep how many steps were made by then; nil if none did.
	Target        float64  `json:"target,omitempty"`
	TargetSeconds *float64 `json:"target_s,omitempty"`
	TargetStep    *int     `json:"target_step,omitempty"`
	// TargetRounds and TargetSentBytes are how often the ranks had exchanged then, and what a
	// rank had sent, nil if no test reached the target.
	TargetRounds    *int     `json:"target_rounds,omitempty"`
	TargetSentBytes *float64 `json:"target_sent_bytes_per_rank,omitempty"`

	// Hash is the hash of the weights at the end (FNV-1a of 64 bits), which are the same on all ranks.
	Hash string `json:"hash"`
	// Tests are the accuracies during the training, the last one at its end.
	Tests []Test `json:"tests"`
	// Curve has a point for every step.
	Curve []Point `json:"-"`
}

// Name is the name of the pattern, what auto has chosen, as what values travel unless that is f32,
// and the window of an outer loop.
func (r Result) Name() string {
	name := backend.PatternName(r.Pattern, r.Chosen, r.Values)
	if r.Outer > 0 {
		name += fmt.Sprintf(", every %d", r.Outer)
	}
	return name
}

// Point is the state after a step.
type Point struct {
	// SentBytes a rank has sent since the start, the mean over ranks.
	SentBytes float64
	// Seconds since the start, without the time of tests.
	Seconds float64
	// Loss is the mean over the step's examples, before the update.
	Loss float64
}

// Test is a measurement of the accuracy.
type Test struct {
	// Step is how many steps were made.
	Step int `json:"step"`
	// Seconds since the start, without the time of tests.
	Seconds float64 `json:"s"`
	// SentBytes a rank has sent since the start, the mean over ranks.
	SentBytes float64 `json:"sent_bytes"`
	// Accuracy on the test examples, in percent.
	Accuracy float64 `json:"accuracy"`
	// Loss is their mean, in nats.
	Loss float64 `json:"loss"`

	rounds int // until then
}

// Observer is told of the progress, on rank 0.
type Observer interface {
	// Step is called after each step of a pattern; steps is their number.
	Step(name string, step, steps int)
	// Finished is called after each pattern.
	Finished(r Result)
}

// Package tuning has the constants of the sparse patterns that tests change, so that what
// happens rarely happens in a few steps. Programs have the defaults.
package tuning

import "sync/atomic"

// Tuning are the constants. A zero is the default.
type Tuning struct {
	// ThresholdInterval is for how many steps a threshold is reused before it is
	// computed exactly again (topkAopt, oktopk), 32 as in the Ok-Topk paper.
	ThresholdInterval int
	// RebalanceInterval is after how many steps oktopk balances the partitions again, 64 as
	// in the paper.
	RebalanceInterval int
	// BalanceFactor: oktopk spreads the reduced entries evenly before it gathers them if a
	// rank has more than this many times the average, 4 as in the paper.
	BalanceFactor float64
	// TrimFrom is the room of a coded message, in bytes, from which on it travels in two parts on hosts, so that
	// it has its own length and not the most that it may have. That saves a twentieth, or more where indices
	// cluster, and costs a message of a few bytes: as much on 100 Mbit/s among four ranks.
	TrimFrom int
}

var defaults = Tuning{
	ThresholdInterval: 32,
	RebalanceInterval: 64,
	BalanceFactor:     4,
	TrimFrom:          32 << 10,
}

// current are the constants of reducers that are made from now on.
var current atomic.Pointer[Tuning]

func init() { current.Store(&defaults) }

// Current returns the constants of a reducer that is made now.
func Current() Tuning { return *current.Load() }

// Set changes the constants of the reducers that a test makes until its end. Tests that change them do not run in
// parallel.
func Set(test interface{ Cleanup(func()) }, t Tuning) {
	changed := t.withDefaults()
	before := current.Swap(&changed)
	test.Cleanup(func() { current.Store(before) })
}

func (t Tuning) withDefaults() Tuning {
	if t.ThresholdInterval == 0 {
		t.ThresholdInterval = defaults.ThresholdInterval
	}
	if t.RebalanceInterval == 0 {
		t.RebalanceInterval = defaults.RebalanceInterval
	}
	if t.BalanceFactor == 0 {
		t.BalanceFactor = defaults.BalanceFactor
	}
	if t.TrimFrom == 0 {
		t.TrimFrom = defaults.TrimFrom
	}
	return t
}

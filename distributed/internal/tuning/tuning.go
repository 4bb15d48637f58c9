// Package tuning has the constants of the sparse patterns that tests set, so that what
// happens rarely happens in a few steps. Programs have the defaults.
package tuning

import "cmp"

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

// WithDefaults returns t with the defaults of what is not set.
func (t Tuning) WithDefaults() Tuning {
	return Tuning{cmp.Or(t.ThresholdInterval, 32), cmp.Or(t.RebalanceInterval, 64), cmp.Or(t.BalanceFactor, 4), cmp.Or(t.TrimFrom, 32<<10)}
}

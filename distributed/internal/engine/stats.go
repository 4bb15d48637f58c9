package engine

import (
	"fmt"
	"time"
)

// Stats tells what the last step of a [Reducer] did on this rank, field by field as sparse.Stats does.
type Stats struct {
	Step           int    // its number, from 0
	Pattern        string // what ran; empty: nothing was sent
	Dense          bool   // everything was sent
	Skipped        bool   // the step was rolled back for a number that is not finite
	Elements       int    // length of the tensor
	K              int    // entries that a rank was to select
	SelectedLocal  int    // that this rank selected
	SelectedGlobal int    // that the result was put together from
	// Threshold is the magnitude from which entries were selected, GlobalThreshold the result's; 0: none.
	Threshold, GlobalThreshold float32
	SentElements, SentBytes    int64         // by this rank, as package metered counts
	SelectTime, ExchangeTime   time.Duration // of the host
	Chosen                     string        // the pattern that was chosen for Auto; empty: none
}

// Choice is what the ranks found for [Auto]: Pattern is used. Elements and K are what was measured, which
// is a part of a tensor whose steps of topkA take more than 6 to 12 ms, and Trials the patterns, the fastest first.
type Choice struct {
	Pattern     string  // the fastest one
	Elements, K int     // length of the tensor, and entries that a rank selects of it
	Trials      []Trial // of all candidates, the fastest first
}

// Trial is what a step of a pattern takes: the median of rounds, on the slowest rank.
type Trial struct {
	Pattern string        // that was tried
	Time    time.Duration // of a step, on the slowest rank
}

// String is as in "topkA 1.2ms".
func (t Trial) String() string {
	return fmt.Sprintf("%s %v", t.Pattern, t.Time.Round(100*time.Nanosecond))
}

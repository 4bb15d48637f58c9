package engine

import (
	"fmt"
	"time"
)

// Stats are the statistics of the last step of a [Reducer] on this rank, field by field as in sparse.Stats.
type Stats struct {
	Step           int    // its number, from 0
	Pattern        string // the pattern used; empty: nothing was sent
	Dense          bool   // everything was sent
	Skipped        bool   // the step was rolled back because a number is not finite
	Elements       int    // length of the tensor
	K              int    // entries to select on each rank
	SelectedLocal  int    // entries selected by this rank
	SelectedGlobal int    // entries from which the result was made
	// Threshold is the least magnitude of selected entries, GlobalThreshold the result's; 0: none.
	Threshold, GlobalThreshold float32
	SentElements, SentBytes    int64         // by this rank, as package metered counts
	SelectTime, ExchangeTime   time.Duration // on the host
	Chosen                     string        // the pattern chosen for Auto; empty: none
}

// Choice is the result of [Auto]: Pattern is used. Elements and K describe the trials, on a part of the tensor if
// steps of topkA take more than 6 to 12 ms, and Trials are the patterns, the fastest first.
type Choice struct {
	Pattern     string  // the fastest one
	Elements, K int     // length of the tensor in the trials, and entries that a rank selects
	Trials      []Trial // of all candidates, the fastest first
}

// Trial is the time of a step of a pattern: the median of rounds, on the slowest rank.
type Trial struct {
	Pattern string        // that was tried
	Time    time.Duration // of a step, on the slowest rank
}

// String returns a text such as "topkA 1.2ms".
func (t Trial) String() string {
	return fmt.Sprintf("%s %v", t.Pattern, t.Time.Round(100*time.Nanosecond))
}

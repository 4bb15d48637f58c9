// Package fault lets ranks report to their launchers, over the job's store, which other ranks they have lost, and why.
// From these reports the launchers name the rank to blame, which need not be the first to end.
package fault

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/tutti-go/tutti/internal/printable"
)

// Prefix is the prefix of the keys of reports.
const Prefix = "fault/"

// EndedPrefix is the prefix of the keys by which launchers tell ranks which others have succeeded, in a job that is
// not elastic.
const EndedPrefix = "ended/"

// EndedKey returns the key of a rank that has ended.
func EndedKey(rank int) string { return EndedPrefix + strconv.Itoa(rank) }

// EndedRank returns the rank of such a key. ok is false unless the rank belongs to a job of that size.
func EndedRank(key string, size int) (rank int, ok bool) {
	text, ok := strings.CutPrefix(key, EndedPrefix)
	rank, err := strconv.Atoi(text)
	return rank, ok && err == nil && rank >= 0 && rank < size
}

// longestReason bounds a reason, in bytes.
const longestReason = 500

// Kind says what a rank knows of another one that it reports.
type Kind string

// Kinds of reports.
const (
	Lost      Kind = ""          // it was connected, and the connection was lost
	Unreached Kind = "unreached" // there never was a connection to it, and a deadline has passed
	Tried     Kind = "tried"     // the same, and the reporter has failed to connect to it
	Heard     Kind = "heard"     // the same, and it says that it has failed to connect to the reporter
	Late      Kind = "late"      // it is connected, and a deadline has passed while the other rank waited for it
)

// Report says that a rank has lost another one, or has waited for it until a deadline.
type Report struct {
	Kind   Kind   `json:"kind,omitempty"`
	By     int    `json:"by"`
	About  int    `json:"about"`
	Reason string `json:"reason"` // such as "nothing has come from it for 10s"; for Heard, what About says of By
}

// Key returns the report's key in the store.
func (r Report) Key() string { return fmt.Sprintf("%s%d/%d", Prefix, r.By, r.About) }

// Value returns the report in the form of the store.
func (r Report) Value() []byte {
	r.Reason = r.Reason[:min(len(r.Reason), longestReason)]
	text, _ := json.Marshal(r)
	return text
}

// Read reads a report, which may come from anybody who knows the job's secret. ok is false unless it is about ranks of
// a job of that size.
func Read(value []byte, size int) (r Report, ok bool) {
	if json.Unmarshal(value, &r) != nil {
		return Report{}, false
	}
	for _, rank := range []int{r.By, r.About} {
		if rank < 0 || rank >= size {
			return Report{}, false
		}
	}
	r.Reason = printable.Text(r.Reason[:min(len(r.Reason), longestReason)])
	return r, r.Reason != "" && r.By != r.About
}

// Package fault has ranks tell their launchers, over the job's store, which other ranks they have lost, and why. The
// launchers name the rank that is to blame by that, which need not be the first to end.
package fault

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/tutti-go/tutti/internal/printable"
)

// Prefix is what the keys of reports begin with.
const Prefix = "fault/"

// EndedPrefix is what the keys begin with by which launchers tell ranks which others have ended with success, in a job
// that is not elastic.
const EndedPrefix = "ended/"

// EndedKey is the key of a rank that has ended.
func EndedKey(rank int) string { return EndedPrefix + strconv.Itoa(rank) }

// EndedRank returns the rank of such a key. ok is false unless it is one of a job of that size.
func EndedRank(key string, size int) (rank int, ok bool) {
	text, ok := strings.CutPrefix(key, EndedPrefix)
	rank, err := strconv.Atoi(text)
	return rank, ok && err == nil && rank >= 0 && rank < size
}

// longestReason bounds a reason, in bytes.
const longestReason = 500

// Kind is what a rank knows of another one that it reports.
type Kind string

// Kinds of reports.
const (
	Lost      Kind = ""          // it was connected to, and is lost
	Unreached Kind = "unreached" // there never was a connection to it, and a deadline has passed
	Tried     Kind = "tried"     // likewise, and the reporter has tried in vain to connect to it
	Heard     Kind = "heard"     // likewise, and it says that it has tried in vain to connect to the reporter
	Late      Kind = "late"      // it is connected to, and a deadline has passed while the other rank waited for it
)

// Report says that a rank has lost another one, or has waited for it in vain.
type Report struct {
	Kind   Kind   `json:"kind,omitempty"`
	By     int    `json:"by"`
	About  int    `json:"about"`
	Reason string `json:"reason"` // such as "nothing has come from it for 10s"; if Heard what About says of By
}

// Key is where the report stands in the store.
func (r Report) Key() string { return fmt.Sprintf("%s%d/%d", Prefix, r.By, r.About) }

// Value is the report as the store has it.
func (r Report) Value() []byte {
	r.Reason = r.Reason[:min(len(r.Reason), longestReason)]
	text, _ := json.Marshal(r)
	return text
}

// Read reads a report, which may have come from anybody who knows the job's secret. ok is false unless it is about
// ranks of a job of that size.
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

// Package machine describes a host's resources, and the share of them that this process may use.
package machine

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
)

// Bound returns a warning if a launcher has bound this process to one of the host's processors, and "" otherwise. All
// threads of Go then take turns on that processor.
func Bound() string {
	if all := online(); runtime.NumCPU() == 1 && all > 1 {
		return fmt.Sprintf(
			"this process may use 1 of the host's %d processors: start ranks with --bind-to none, "+
				"or --map-by slot:PE=n for n processors each",
			all,
		)
	}
	return ""
}

// count returns the number of processors in a list such as "0-3,6", 0 if it is not a list.
func count(list string) int {
	n := 0
	for _, part := range strings.Split(strings.TrimSpace(list), ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err := strconv.Atoi(first)
		to, err2 := strconv.Atoi(last)
		if err != nil || err2 != nil || from < 0 || to < from {
			return 0
		}
		n += to - from + 1
	}
	return n
}

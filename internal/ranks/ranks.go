// Package ranks formats lists of ranks for messages.
package ranks

import (
	"fmt"
	"strings"
)

// mostParts bounds the number of ranks and ranges in a list.
const mostParts = 10

// Text returns "rank 3" or "ranks 0-3, 7, 9, … (25 in all)".
func Text(ranks []int) string {
	if len(ranks) == 1 {
		return fmt.Sprintf("rank %d", ranks[0])
	}
	var parts []string
	for i := 0; i < len(ranks); {
		n := 1
		for i+n < len(ranks) && ranks[i+n] == ranks[i]+n {
			n++
		}
		switch {
		case len(parts) == mostParts:
			parts = append(parts, fmt.Sprintf("… (%d in all)", len(ranks)))
			n = len(ranks)
		case n > 2:
			parts = append(parts, fmt.Sprintf("%d-%d", ranks[i], ranks[i+n-1]))
		default:
			parts = append(parts, fmt.Sprint(ranks[i]))
			n = 1
		}
		i += n
	}
	return "ranks " + strings.Join(parts, ", ")
}

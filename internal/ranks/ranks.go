// Package ranks writes lists of ranks for messages.
package ranks

import (
	"fmt"
	"strings"
)

// Text returns "rank 3" or "ranks 0, 2, 3".
func Text(ranks []int) string {
	text := strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
	if len(ranks) == 1 {
		return "rank " + text
	}
	return "ranks " + text
}

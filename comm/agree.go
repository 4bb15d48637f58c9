package comm

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Agree compares what the ranks of a communicator have called as one collective,
// in rank order. If they disagree it returns an error wrapping [ErrMismatch] that
// says who called what: for a backend that has the calls of all ranks before it
// touches their memory.
func Agree(calls []Call) error {
	first := &calls[0]
	same := func(c Call) bool {
		return c.Op == first.Op && c.DType == first.DType && c.Reduce == first.Reduce && c.Peer == first.Peer && c.Count == first.Count
	}
	if slices.ContainsFunc(calls, func(c Call) bool { return !same(c) }) {
		return fmt.Errorf("%w: %s", ErrMismatch, whoCalledWhat(calls))
	}
	for r := range calls {
		switch first.Op {
		case OpAllGatherV:
			for i, n := range calls[r].RecvCounts {
				if want := first.RecvCounts[i]; n != want {
					return fmt.Errorf("%w: %v, where rank 0 passed counts[%d] = %d, rank %d passed %d", ErrMismatch, first, i, want, r, n)
				}
			}
		case OpAllToAllV:
			for to, n := range calls[r].SendCounts {
				if want := calls[to].RecvCounts[r]; n != want {
					return fmt.Errorf("%w: %v, where rank %d sends %d elements to rank %d, which receives %d", ErrMismatch, first, r, n, to, want)
				}
			}
		}
	}
	return nil
}

// AgreeOnMessage is [Agree] for the two ends of a message.
func AgreeOnMessage(sender int, send *Call, receiver int, recv *Call) error {
	if send.Count == recv.Count && send.DType == recv.DType && send.Tag == recv.Tag {
		return nil
	}
	return fmt.Errorf("%w: rank %d called %v; rank %d called %v", ErrMismatch, sender, send, receiver, recv)
}

// whoCalledWhat lists the ranks by what they called.
func whoCalledWhat(calls []Call) string {
	var variants []string
	callers := map[string][]int{}
	for r, c := range calls {
		text := c.String()
		if callers[text] == nil {
			variants = append(variants, text)
		}
		callers[text] = append(callers[text], r)
	}
	for i, text := range variants {
		variants[i] = RanksText(callers[text]) + " called " + text
	}
	return strings.Join(variants, "; ")
}

// RanksText returns "rank 3" or "ranks 0, 2, 3", for messages.
func RanksText(ranks []int) string {
	text := strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
	if len(ranks) == 1 {
		return "rank " + text
	}
	return "ranks " + text
}

// SplitGroups returns the groups that ranks form by their Splits, which are given
// in rank order: those of one color, ordered by key, then by rank.
func SplitGroups(splits []Wait) [][]int {
	var ranks []int
	for r, s := range splits {
		if s.Color >= 0 {
			ranks = append(ranks, r)
		}
	}
	slices.SortStableFunc(ranks, func(a, b int) int {
		return cmp.Or(cmp.Compare(splits[a].Color, splits[b].Color), cmp.Compare(splits[a].Key, splits[b].Key))
	})
	var groups [][]int
	for len(ranks) > 0 {
		n := 1
		for n < len(ranks) && splits[ranks[n]].Color == splits[ranks[0]].Color {
			n++
		}
		groups, ranks = append(groups, ranks[:n:n]), ranks[n:]
	}
	return groups
}

package backend

import (
	"cmp"
	"slices"

	"github.com/tutti-go/tutti/comm"
)

// SplitGroups returns the groups that ranks form by their Splits, which are given
// in rank order: for each color, in ascending order, the ranks of the parent in the order
// of their new ranks, by key, then by rank. Ranks with a negative color are in none. The
// slices are the caller's.
func SplitGroups(splits []comm.Wait) [][]int {
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
		groups = append(groups, ranks[:n:n])
		ranks = ranks[n:]
	}
	return groups
}

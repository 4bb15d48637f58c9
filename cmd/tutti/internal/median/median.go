// Package median has the statistic that all measurements report.
package median

import "slices"

// Of returns the middle of some values, and the mean of the two in the middle
// if their number is even. There must be one at least.
func Of(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

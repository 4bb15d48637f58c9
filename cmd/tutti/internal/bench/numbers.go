package bench

import (
	"math"
	"slices"
)

// median of a non-empty slice, which it sorts. Of an even number of values it
// is the mean of the two in the middle.
func median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}

// significant rounds to five significant digits, more than any measurement has.
func significant(v float64) float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return v
	}
	scale := math.Pow(10, 4-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}

package bench

import "math"

// significant rounds to five significant digits, more than any measurement has.
func significant(v float64) float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return v
	}
	scale := math.Pow(10, 4-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}

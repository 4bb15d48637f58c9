package bench

import "strconv"

// significant rounds to five significant digits, more than any measurement has.
func significant(v float64) float64 {
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 5, 64), 64)
	return v
}

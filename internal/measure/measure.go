// Package measure has the common parts of all measurements of this module: rounds in which subjects take turns, the
// time of the slowest rank, and statistics of rounds.
package measure

import (
	"math"
	"slices"
)

// Round runs a subject once and returns its duration on this rank in seconds.
type Round func() (seconds float64, err error)

// Slowest returns the largest of the ranks' values, element by element, the same on every
// rank. It is collective. The values may be overwritten.
type Slowest func(values []float64) ([]float64, error)

// InTurns runs some rounds of each subject, after warmup rounds, and returns the seconds of each round on the slowest
// rank, by subject. The subjects take turns, and take turns at being first, so that other load on the machine disturbs
// all of them alike.
func InTurns(warmup, rounds int, slowest Slowest, subjects ...Round) ([][]float64, error) {
	times := make([]float64, len(subjects)*rounds) // grouped by subject
	for i := range warmup + rounds {
		for turn := range subjects {
			subject := (turn + i) % len(subjects)
			seconds, err := subjects[subject]()
			if err != nil {
				return nil, err
			}
			if i >= warmup {
				times[subject*rounds+i-warmup] = seconds
			}
		}
	}
	times, err := slowest(times)
	return slices.Collect(slices.Chunk(times, max(rounds, 1))), err
}

// Fit returns the number of iterations that take about this many seconds on the slowest rank, from 1 to limit.
func Fit(seconds float64, limit int, slowest Slowest, run func(iterations int) (float64, error)) (int, error) {
	for iterations := 2; ; iterations *= 8 {
		local, err := run(iterations)
		if err != nil {
			return 0, err
		}
		took, err := slowest([]float64{local})
		if err != nil {
			return 0, err
		}
		if took[0] > seconds/16 || iterations >= limit {
			return int(math.Round(min(max(float64(iterations)*seconds/took[0], 1), float64(limit)))), nil
		}
	}
}

// Alone is the Slowest of measurements by one process.
func Alone(values []float64) ([]float64, error) {
	return values, nil
}

// Median returns the median of at least one value; for an even number it is the mean of the two in the middle.
func Median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

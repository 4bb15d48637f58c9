package measure

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
)

const (
	seed      = 7
	n         = 20_000
	deviation = 3
)

// step adds a gradient and sends the entries whose magnitude is at least threshold, or,
// if that is 0, the k of the largest. It returns the threshold and how many were sent.
func step(rng *rand.Rand, residual []float32, k int, threshold float32) (float32, int) {
	magnitudes := make([]float32, len(residual))
	for i := range residual {
		residual[i] += deviation * float32(rng.NormFloat64())
		magnitudes[i] = float32(math.Abs(float64(residual[i])))
	}
	if threshold == 0 {
		sorted := slices.Sorted(slices.Values(magnitudes))
		threshold = sorted[len(sorted)-k]
	}
	sent := 0
	for i, m := range magnitudes {
		if m >= threshold {
			residual[i] = 0
			sent++
		}
	}
	return threshold, sent
}

// Residuals of many steps, each of which sends the entries of largest magnitude, have
// the quantiles of what is drawn, and the same threshold; and that serves from the
// first step on.
func TestDrawIsWhatStepsLeave(t *testing.T) {
	for _, interval := range []int{10, 30} {
		rng := rand.New(rand.NewPCG(seed, uint64(interval)))
		const rounds = 6
		k := n / interval
		arrived, began := make([]float32, n), make([]float32, n)
		for range rounds * interval {
			step(rng, arrived, k, 0)
		}
		DrawResidual(rng, began, deviation, float64(interval))
		reach := deviation * math.Sqrt(float64(interval))
		one, two := slices.Sorted(slices.Values(arrived)), slices.Sorted(slices.Values(began))
		for _, part := range []float64{0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99} {
			assert.InDelta(t, one[int(part*n)], two[int(part*n)], 0.06*reach, "seed %d: one in %d, quantile %g", seed, interval, part)
		}
		want, _ := step(rng, arrived, k, 0)
		threshold, _ := step(rng, began, k, 0)
		assert.InEpsilon(t, want, threshold, 0.02, "seed %d: one in %d", seed, interval)
		sum := 0
		for range 20 {
			_, sent := step(rng, began, k, threshold)
			sum += sent
		}
		assert.InEpsilon(t, 20*k, sum, 0.04, "seed %d: one in %d", seed, interval)
	}
}

package measure

import (
	"math"
	"math/rand/v2"
)

// DrawResidual fills values with the entries of a typical residual after many steps with error feedback, as a starting
// point of measurements: from zero it takes hundreds of steps, and in the first of them thresholds last one step and
// nothing is reused. Gradients have independent entries with this standard deviation and a mean of zero, and one entry
// in interval is sent in a step.
//
// An entry is a random walk, with the gradient's deviation as its step, that restarts from zero when it is sent. If
// one in m is sent in a step, an entry is sent after m steps on average, the square of its distance in steps. Walks
// until then are distributed like the difference of two uniform numbers. That holds for walks of small steps. A walk
// that is sent has passed the threshold by 0.58 steps (Siegmund, "Corrected diffusion approximations in certain random
// walk problems", 1979), so values drawn that close to the end count as sent.
func DrawResidual(rng *rand.Rand, values []float32, deviation, interval float64) {
	reach := float32(deviation * math.Sqrt(interval))
	threshold := reach - float32(0.5826*deviation)
	for i := range values {
		if v := reach * (rng.Float32() - rng.Float32()); v < threshold && v > -threshold {
			values[i] = v
		} else {
			values[i] = 0
		}
	}
}

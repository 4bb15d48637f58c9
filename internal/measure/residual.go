package measure

import (
	"math"
	"math/rand/v2"
)

// DrawResidual fills values with entries of what error feedback leaves in a residual after
// many steps, for measurements that begin there: from zero it takes hundreds of steps, in the
// first of which thresholds serve for one step, and what is reused is not. Gradients have
// independent entries with this standard deviation and a mean of zero, and one entry in
// interval is sent in a step.
//
// An entry is a random walk, with the gradient's deviation as its step, that starts
// from zero again when it is sent. If one in m is sent in a step, that is after m
// steps, the square of how far it got, and until then the walks are distributed as
// the difference of two uniform numbers is. That holds for walks of small steps: one
// that is sent has passed the threshold already, by 0.58 steps (Siegmund, "Corrected
// diffusion approximations in certain random walk problems", 1979), so what is drawn
// that close to its end has been sent.
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

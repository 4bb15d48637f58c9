package distributed

import "math"

// exact picks exactly the k entries of largest magnitude, of equal ones that
// with the lower index.
type exact struct{ *engine }

func exactSelector(e *engine) selector { return exact{e} }

func (s exact) capacity(k int) int { return k }

func (s exact) pick(k int, dst list) (list, float32) { return s.topK(s.residual, s.n, k, dst) }

// nonzero is pick without the zeros that fill up a list when the tensor has
// fewer than k other entries: where list lengths may vary, they need not
// travel.
func (s exact) nonzero(k int, dst list) (list, float32) {
	picks, threshold := s.pick(k, dst)
	if threshold == 0 {
		threshold = tiny
		picks, _ = s.aboveThreshold(s.residual, s.n, threshold, dst)
	}
	return picks, threshold
}

// nothing picks no entry, for an exchange that takes the whole residual.
type nothing struct{}

func noSelector(*engine) selector { return nothing{} }

func (nothing) capacity(int) int { return 0 }

func (nothing) pick(_ int, dst list) (list, float32) { return dst.part(0, 0), 0 }

// roomFor is the capacity of selectors that meet k only about: if more
// entries than that pass a threshold, the threshold is no good.
func (e *engine) roomFor(k int) int { return min(2*k, e.n) }

// reused picks by the threshold of an earlier exact top-k. Gradient
// distributions change slowly (Li and Hoefler, section 3.1.3), so a threshold
// serves many steps; between them one pass over the tensor is enough.
type reused struct {
	exact
	k         int
	threshold float32
	age       int // steps since the threshold was exact
}

func reusedSelector(e *engine) selector { return &reused{exact: exact{e}} }

func (s *reused) capacity(k int) int { return s.roomFor(k) }

func (s *reused) pick(k int, dst list) (list, float32) {
	s.age++
	if s.k == k && s.age < s.cfg.ThresholdInterval {
		picks, total := s.aboveThreshold(s.residual, s.n, s.threshold, dst)
		if total <= dst.n && total >= (k+3)/4 {
			used := s.threshold
			s.threshold = correct(used, total, k, s.cfg.ThresholdStep)
			return picks, used
		}
	}
	picks, threshold := s.nonzero(k, dst)
	s.k, s.threshold, s.age = k, threshold, 0
	return picks, threshold
}

// correct moves a threshold that let total entries pass where k were wanted,
// if it was off by more than a third below or a quarter above.
func correct(threshold float32, total, k int, step float64) float32 {
	switch {
	case 3*total < 2*k:
		threshold /= float32(step)
	case 4*total > 5*k:
		threshold *= float32(step)
	}
	return max(threshold, tiny)
}

// gaussian picks by the threshold that k of n entries would pass if they were
// normally distributed, corrected until about k do.
//
// Gradients have heavier tails than the normal distribution, so that the
// first threshold is often far off. The published code corrects it by 2 % at a
// time, at most 20 times; here the correction grows, which takes fewer passes
// over the tensor and gets farther.
type gaussian struct{ exact }

func gaussianSelector(e *engine) selector { return gaussian{exact{e}} }

func (s gaussian) capacity(k int) int { return s.roomFor(k) }

func (s gaussian) pick(k int, dst list) (list, float32) {
	threshold := s.fit(k)
	if math.IsNaN(float64(threshold)) || math.IsInf(float64(threshold), 0) {
		return s.nonzero(k, dst) // there is a NaN or an infinity among the entries
	}
	picks, total := s.aboveThreshold(s.residual, s.n, threshold, dst)
	if 4*total < 3*k || 4*total > 5*k {
		threshold, total = s.adjust(threshold, total, k)
		if total > 0 && total <= dst.n {
			picks, total = s.aboveThreshold(s.residual, s.n, threshold, dst)
		}
	}
	// No threshold separates the entries of a constant tensor, and a few
	// outliers can put the fit out of the correction's reach.
	if total == 0 || total > dst.n {
		return s.nonzero(k, dst)
	}
	return picks, threshold
}

// fit returns t such that a share k/n of a normal distribution with the
// tensor's mean and deviation is farther than t from the mean.
func (s gaussian) fit(k int) float32 {
	if s.err != nil {
		return 0
	}
	mean, std, err := s.kernels.MeanStd(s.residual, s.n)
	s.check(err)
	t := math.Abs(mean) + std*math.Sqrt2*math.Erfinv(1-float64(k)/float64(s.n))
	return max(float32(t), tiny)
}

// adjust searches for a threshold that between 3k/4 and 5k/4 entries pass: it
// moves by ever larger factors until the goal lies between two thresholds, and
// halves that interval then.
func (s gaussian) adjust(threshold float32, total, k int) (float32, int) {
	factor, bracketed := 1.01, false
	up := 4*total > 5*k
	for range s.cfg.FitSteps {
		above := 4*total > 5*k
		if !above && (4*total >= 3*k || threshold == tiny) {
			break
		}
		if above != up {
			bracketed, up = true, above
		}
		if bracketed {
			factor = math.Sqrt(factor)
		} else {
			factor *= factor
		}
		if up {
			threshold *= float32(factor)
		} else {
			threshold = max(threshold/float32(factor), tiny)
		}
		total = s.countAbove(s.residual, s.n, threshold)
	}
	return threshold, total
}

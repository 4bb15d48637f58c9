package digits

import (
	"math"
	"slices"
)

// Scores returns the scores of the classes for an image, by a softmax regression. weights has Pixels × Classes
// weights, optionally followed by a bias for each class.
func Scores(weights, image []float32) (all [Classes]float64) {
	for k, bias := range weights[Pixels*Classes:] {
		all[k] = float64(bias)
	}
	for j, x := range image {
		for k := range all {
			all[k] += float64(weights[j*Classes+k] * x)
		}
	}
	return all
}

// Descend adds rate times the gradient of an image's loss to update, which may be the weights themselves.
func Descend(update, weights, image []float32, label uint8, rate float64) {
	p := Scores(weights, image)
	sum := 0.0
	for k := range p {
		p[k] = math.Exp(p[k])
		sum += p[k]
	}
	for k := range p {
		p[k] /= sum
		if k == int(label) {
			p[k]--
		}
	}
	for j, x := range image {
		for k, d := range p {
			update[j*Classes+k] += float32(rate * d * float64(x))
		}
	}
	for k := range update[Pixels*Classes:] {
		update[Pixels*Classes+k] += float32(rate * p[k])
	}
}

// Accuracy returns the fraction of images that the weights classify correctly.
func Accuracy(weights []float32, set Set) float64 {
	right := 0
	for i, label := range set.Labels {
		if all := Scores(weights, set.Image(i)); all[label] == slices.Max(all[:]) {
			right++
		}
	}
	return float64(right) / float64(set.Len())
}

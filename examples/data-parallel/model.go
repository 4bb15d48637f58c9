package main

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/examples/digits"
)

const hidden = 32 // units of the layer between pixels and digits

// model is a perceptron with one hidden layer of rectified linear units and a
// softmax. Its parameters are one slice, so that an update is one tensor.
type model struct {
	parameters []float32 // of both layers
}

// layers are views of parameters or of their gradient. Weights are in row order, with one row for each output.
type layers struct{ w1, b1, w2, b2 []float32 }

func cut(v []float32) layers {
	const n1, n2 = hidden * digits.Pixels, digits.Classes * hidden
	return layers{
		v[:n1],
		v[n1:][:hidden],
		v[n1+hidden:][:n2],
		v[n1+hidden+n2:],
	}
}

func newModel(seed uint64) *model {
	m := &model{make([]float32, hidden*(digits.Pixels+1)+digits.Classes*(hidden+1))}
	rng := rand.New(rand.NewPCG(seed, 0))
	p := cut(m.parameters)
	for i := range p.w1 {
		p.w1[i] = float32(rng.NormFloat64() * math.Sqrt(2./digits.Pixels))
	}
	for i := range p.w2 {
		p.w2[i] = float32(rng.NormFloat64() * math.Sqrt(2./hidden))
	}
	return m
}

// forward returns the hidden layer and the probability of each digit.
func (m *model) forward(image []float32) (h, probability []float32) {
	p := cut(m.parameters)
	h = make([]float32, hidden)
	probability = make([]float32, digits.Classes)
	for j := range h {
		z := p.b1[j]
		for i, x := range image {
			z += float32(p.w1[j*digits.Pixels+i] * x)
		}
		h[j] = max(z, 0)
	}
	var sum float32
	for k := range probability {
		z := p.b2[k]
		for j, x := range h {
			z += float32(p.w2[k*hidden+j] * x)
		}
		probability[k] = float32(math.Exp(float64(z)))
		sum += probability[k]
	}
	for k := range probability {
		probability[k] /= sum
	}
	return h, probability
}

// gradient returns the gradient of the cross-entropy, averaged over images.
func (m *model) gradient(set digits.Set, images []int) []float32 {
	gradient := make([]float32, len(m.parameters))
	p := cut(m.parameters)
	g := cut(gradient)
	scale := 1 / float32(len(images))
	for _, image := range images {
		x := set.Image(image)
		h, delta := m.forward(x)
		delta[set.Labels[image]]--
		back := make([]float32, hidden)
		for k, d := range delta {
			d *= scale
			g.b2[k] += d
			for j := range h {
				g.w2[k*hidden+j] += float32(d * h[j])
				back[j] += float32(d * p.w2[k*hidden+j])
			}
		}
		for j, d := range back {
			if h[j] == 0 {
				continue
			}
			g.b1[j] += d
			for i := range x {
				g.w1[j*digits.Pixels+i] += float32(d * x[i])
			}
		}
	}
	return gradient
}

// accuracy returns the fraction of images whose digit is the most probable one.
func (m *model) accuracy(set digits.Set, images []int) float64 {
	right := 0
	for _, image := range images {
		if _, probability := m.forward(set.Image(image)); probability[set.Labels[image]] == slices.Max(probability) {
			right++
		}
	}
	return float64(right) / float64(max(len(images), 1))
}

package main

import (
	"math"
	"math/rand/v2"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/tutti-go/tutti/examples/digits"
)

const hidden = 32 // units of the layer between pixels and digits

// model is a perceptron with one hidden layer.
type model struct {
	graph          *G.ExprGraph // of the loss
	images, labels []float32    // of a batch; labels are one-hot
	parameters     G.Nodes      // trained parameters
}

func newModel(seed uint64) (*model, error) {
	g := G.NewGraph()
	m := &model{
		graph:  g,
		images: make([]float32, batch*digits.Pixels),
		labels: make([]float32, batch*digits.Classes),
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	parameter := func(name string, rows, columns int, deviation float64) *G.Node {
		values := make([]float32, rows*columns)
		for i := range values {
			values[i] = float32(rng.NormFloat64() * deviation)
		}
		node := G.NewMatrix(
			g,
			tensor.Float32,
			G.WithName(name),
			G.WithValue(tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(values))),
		)
		m.parameters = append(m.parameters, node)
		return node
	}
	input := func(name string, columns int, values []float32) *G.Node {
		return G.NewMatrix(
			g,
			tensor.Float32,
			G.WithName(name),
			G.WithValue(tensor.New(tensor.WithShape(batch, columns), tensor.WithBacking(values))),
		)
	}
	x := input("images", digits.Pixels, m.images)
	y := input("labels", digits.Classes, m.labels)
	w1 := parameter("w1", digits.Pixels, hidden, math.Sqrt(2./digits.Pixels))
	b1 := parameter("b1", 1, hidden, 0)
	w2 := parameter("w2", hidden, digits.Classes, math.Sqrt(2./hidden))
	b2 := parameter("b2", 1, digits.Classes, 0)

	linear := func(x, w, b *G.Node) *G.Node {
		product := G.Must(G.Mul(x, w))
		return G.Must(G.BroadcastAdd(product, b, nil, []byte{0}))
	}
	h := G.Must(G.Rectify(linear(x, w1, b1)))
	p := G.Must(G.SoftMax(linear(h, w2, b2)))
	likelihoods := G.Must(G.HadamardProd(y, G.Must(G.Log(p))))
	loss := G.Must(G.Neg(G.Must(G.Mean(G.Must(G.Sum(likelihoods, 1))))))
	_, err := G.Grad(loss, m.parameters...)
	return m, err
}

// fill copies a batch of images to the graph's inputs.
func (m *model) fill(set digits.Set, images []int) {
	clear(m.labels)
	for row, image := range images {
		copy(m.images[row*digits.Pixels:], set.Image(image))
		m.labels[row*digits.Classes+int(set.Labels[image])] = 1
	}
}

// accuracy returns the fraction of images whose digit has the highest score. It computes on the host, because the
// graph has a fixed batch size.
func (m *model) accuracy(set digits.Set) float64 {
	values := func(i int) []float32 {
		return m.parameters[i].Value().Data().([]float32)
	}
	w1 := values(0)
	b1 := values(1)
	w2 := values(2)
	b2 := values(3)
	right := 0
	for image := range set.Len() {
		scores := append([]float32(nil), b2...)
		for j := range hidden {
			z := b1[j]
			for i, x := range set.Image(image) {
				z += x * w1[i*hidden+j]
			}
			for k := range scores {
				scores[k] += max(z, 0) * w2[j*digits.Classes+k]
			}
		}
		best := 0
		for k, score := range scores {
			if score > scores[best] {
				best = k
			}
		}
		if best == int(set.Labels[image]) {
			right++
		}
	}
	return float64(right) / float64(set.Len())
}

package train

import (
	"math"
	"math/rand/v2"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"

	"github.com/tutti-go/tutti/examples/digits"
)

// model is a multilayer perceptron with one hidden layer of rectified linear
// units and a softmax output, trained on the cross-entropy loss. All its
// parameters lie in one slice, in the order of [layers], so that a gradient is
// one tensor.
type model struct {
	hidden int
	params []float32
	layers layers

	// Work space for up to capacity images.
	capacity      int
	input         []float32 // capacity × Pixels
	activation    []float32 // capacity × hidden, after the rectifier
	probabilities []float32 // capacity × Classes
	backward      []float32 // capacity × hidden, gradient of the hidden layer
}

// layers are the parts of a parameter or gradient vector: weights as
// inputs × outputs matrices in row order, then the biases of the same layer.
type layers struct {
	w1, b1, w2, b2 []float32
}

// all are the layers in their order.
func (l *layers) all() [][]float32 { return [][]float32{l.w1, l.b1, l.w2, l.b2} }

// parameterCount is the length of a parameter vector.
func parameterCount(hidden int) int {
	return digits.Pixels*hidden + hidden + hidden*digits.Classes + digits.Classes
}

// view divides a parameter or gradient vector into layers that share its
// memory.
func view(v []float32, hidden int) layers {
	cut := func(n int) []float32 {
		part := v[:n:n]
		v = v[n:]
		return part
	}
	return layers{
		w1: cut(digits.Pixels * hidden),
		b1: cut(hidden),
		w2: cut(hidden * digits.Classes),
		b2: cut(digits.Classes),
	}
}

// newModel makes a model with zero parameters that takes up to capacity images
// at a time.
func newModel(hidden, capacity int) *model {
	params := make([]float32, parameterCount(hidden))
	return &model{
		hidden:        hidden,
		params:        params,
		layers:        view(params, hidden),
		capacity:      capacity,
		input:         make([]float32, capacity*digits.Pixels),
		activation:    make([]float32, capacity*hidden),
		probabilities: make([]float32, capacity*digits.Classes),
		backward:      make([]float32, capacity*hidden),
	}
}

// initialize draws the weights from normal distributions with variance
// 2/inputs (K. He et al., "Delving Deep into Rectifiers", 2015) and sets the
// biases to zero.
func (m *model) initialize(seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0x1417))
	draw := func(w []float32, inputs int) {
		deviation := math.Sqrt(2 / float64(inputs))
		for i := range w {
			w[i] = float32(rng.NormFloat64() * deviation)
		}
	}
	draw(m.layers.w1, digits.Pixels)
	draw(m.layers.w2, m.hidden)
	clear(m.layers.b1)
	clear(m.layers.b2)
}

// gradient stores in grad (as long as params) the sum of the gradients of the
// loss over the given images, times scale, and returns the sum of the losses.
// There may be no images.
func (m *model) gradient(grad []float32, set digits.Set, images []int, scale float32) (loss float64) {
	clear(grad)
	if len(images) == 0 {
		return 0
	}
	m.forward(set, images)
	n := len(images)
	g := view(grad, m.hidden)

	// The gradient of softmax and cross-entropy together: probabilities minus
	// the one-hot label. It replaces the probabilities.
	for i, image := range images {
		p := m.probabilities[i*digits.Classes : (i+1)*digits.Classes]
		label := set.Labels[image]
		loss -= math.Log(max(float64(p[label]), math.SmallestNonzeroFloat32))
		p[label]--
	}
	delta := matrix(m.probabilities, n, digits.Classes)
	blas32.Gemm(blas.Trans, blas.NoTrans, scale, matrix(m.activation, n, m.hidden), delta, 0, matrix(g.w2, m.hidden, digits.Classes))
	addRows(g.b2, delta, scale)

	hidden := matrix(m.backward, n, m.hidden)
	blas32.Gemm(blas.NoTrans, blas.Trans, 1, delta, matrix(m.layers.w2, m.hidden, digits.Classes), 0, hidden)
	for i, a := range m.activation[:n*m.hidden] {
		if a == 0 {
			m.backward[i] = 0
		}
	}
	blas32.Gemm(blas.Trans, blas.NoTrans, scale, matrix(m.input, n, digits.Pixels), hidden, 0, matrix(g.w1, digits.Pixels, m.hidden))
	addRows(g.b1, hidden, scale)
	return loss
}

// right is the number of images of the set that the model reads right.
func (m *model) right(set digits.Set) int {
	right := 0
	batch := make([]int, 0, m.capacity)
	for i := range set.Len() {
		batch = append(batch, i)
		if len(batch) < m.capacity && i < set.Len()-1 {
			continue
		}
		m.forward(set, batch)
		for row, image := range batch {
			p := m.probabilities[row*digits.Classes : (row+1)*digits.Classes]
			if argmax(p) == int(set.Labels[image]) {
				right++
			}
		}
		batch = batch[:0]
	}
	return right
}

// forward computes the class probabilities of the given images.
func (m *model) forward(set digits.Set, images []int) {
	n := len(images)
	for i, image := range images {
		copy(m.input[i*digits.Pixels:], set.Image(image))
	}
	hidden := matrix(m.activation, n, m.hidden)
	setRows(hidden, m.layers.b1)
	blas32.Gemm(blas.NoTrans, blas.NoTrans, 1, matrix(m.input, n, digits.Pixels), matrix(m.layers.w1, digits.Pixels, m.hidden), 1, hidden)
	for i, z := range hidden.Data {
		hidden.Data[i] = max(z, 0)
	}

	out := matrix(m.probabilities, n, digits.Classes)
	setRows(out, m.layers.b2)
	blas32.Gemm(blas.NoTrans, blas.NoTrans, 1, hidden, matrix(m.layers.w2, m.hidden, digits.Classes), 1, out)
	for i := range n {
		softmax(out.Data[i*digits.Classes : (i+1)*digits.Classes])
	}
}

// softmax replaces logits by probabilities.
func softmax(z []float32) {
	highest := z[argmax(z)]
	var sum float64
	for i, v := range z {
		e := math.Exp(float64(v - highest))
		z[i] = float32(e)
		sum += e
	}
	for i := range z {
		z[i] = float32(float64(z[i]) / sum)
	}
}

// argmax is the index of the largest value, the first of equals.
func argmax(v []float32) int {
	best := 0
	for i, x := range v {
		if x > v[best] {
			best = i
		}
	}
	return best
}

// matrix looks at the first rows × columns values of data, in row order.
func matrix(data []float32, rows, columns int) blas32.General {
	return blas32.General{Rows: rows, Cols: columns, Stride: columns, Data: data[:rows*columns]}
}

// setRows sets every row of m to v.
func setRows(m blas32.General, v []float32) {
	for i := range m.Rows {
		copy(m.Data[i*m.Stride:], v)
	}
}

// addRows adds scale times every row of m to sum.
func addRows(sum []float32, m blas32.General, scale float32) {
	for i := range m.Rows {
		blas32.Axpy(scale,
			blas32.Vector{N: m.Cols, Inc: 1, Data: m.Data[i*m.Stride:]},
			blas32.Vector{N: m.Cols, Inc: 1, Data: sum})
	}
}

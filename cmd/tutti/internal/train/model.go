package train

import (
	"math"
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"
)

// model is a multilayer perceptron with one hidden layer of rectified linear
// units and a softmax output, trained on the cross-entropy loss. All its
// parameters lie in one slice, in the order of [layers], so that a gradient is
// one tensor.
type model struct {
	shape
	params []float32 // all parameters
	layers layers    // views of params

	// Work space for at most capacity examples.
	capacity      int
	input         []float32 // capacity × inputs
	activation    []float32 // capacity × hidden, after the rectifier
	probabilities []float32 // capacity × classes
	backward      []float32 // capacity × hidden, gradient of the hidden layer
}

// shape describes a model. active is the number of an example's inputs that are not 0.
type shape struct{ inputs, active, hidden, classes int }

// layers are the parts of a parameter or gradient vector: weights as
// inputs × outputs matrices in row order, then the biases of the same layer.
type layers struct {
	w1 []float32 // inputs × hidden
	b1 []float32 // hidden
	w2 []float32 // hidden × classes
	b2 []float32 // classes
}

// parameters is the length of a parameter vector.
func (s shape) parameters() int {
	return (s.inputs+1)*s.hidden + (s.hidden+1)*s.classes
}

// view divides a parameter or gradient vector into layers that share its
// memory.
func (s shape) view(v []float32) layers {
	cut := func(n int) []float32 {
		part := v[:n:n]
		v = v[n:]
		return part
	}
	return layers{
		w1: cut(s.inputs * s.hidden),
		b1: cut(s.hidden),
		w2: cut(s.hidden * s.classes),
		b2: cut(s.classes),
	}
}

// newModel makes a model with zero parameters for at most capacity examples at a time.
func newModel(s shape, capacity int) *model {
	params := make([]float32, s.parameters())
	return &model{
		shape:         s,
		params:        params,
		layers:        s.view(params),
		capacity:      capacity,
		input:         make([]float32, capacity*s.inputs),
		activation:    make([]float32, capacity*s.hidden),
		probabilities: make([]float32, capacity*s.classes),
		backward:      make([]float32, capacity*s.hidden),
	}
}

// initialize sets the biases to zero and draws the weights from normal distributions with variance 2/n, where n is
// the number of inputs that are not 0 (K. He et al., "Delving Deep into Rectifiers", 2015).
func (m *model) initialize(seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0x1417))
	draw := func(w []float32, inputs int) {
		deviation := math.Sqrt(2 / float64(inputs))
		for i := range w {
			w[i] = float32(rng.NormFloat64() * deviation)
		}
	}
	draw(m.layers.w1, m.active)
	draw(m.layers.w2, m.hidden)
	clear(m.layers.b1)
	clear(m.layers.b2)
}

// gradient stores in grad (as long as params) the sum of the gradients of the loss over the given examples, times
// scale. It returns the sum of the losses. The batch may be empty.
func (m *model) gradient(grad []float32, set examples, batch []int, scale float32) (loss float64) {
	clear(grad)
	if len(batch) == 0 {
		return 0
	}
	m.forward(set, batch)
	n := len(batch)
	g := m.view(grad)

	// The gradient of softmax and cross-entropy together: probabilities minus
	// the one-hot label. It replaces the probabilities.
	for i, example := range batch {
		p := m.row(i)
		label := set.Labels[example]
		loss += surprise(p[label])
		p[label]--
	}
	delta := matrix(m.probabilities, n, m.classes)
	blas32.Gemm(
		blas.Trans,
		blas.NoTrans,
		scale,
		matrix(m.activation, n, m.hidden),
		delta,
		0,
		matrix(g.w2, m.hidden, m.classes),
	)
	addRows(g.b2, delta, scale)

	hidden := matrix(m.backward, n, m.hidden)
	blas32.Gemm(blas.NoTrans, blas.Trans, 1, delta, matrix(m.layers.w2, m.hidden, m.classes), 0, hidden)
	for i, a := range m.activation[:n*m.hidden] {
		if a == 0 {
			m.backward[i] = 0
		}
	}
	if set.text == nil {
		blas32.Gemm(
			blas.Trans,
			blas.NoTrans,
			scale,
			matrix(m.input, n, m.inputs),
			hidden,
			0,
			matrix(g.w1, m.inputs, m.hidden),
		)
	}
	for i, example := range batch {
		for _, input := range set.context(example) {
			blas32.Axpy(
				scale,
				vector(hidden.Data[i*m.hidden:][:m.hidden]),
				vector(g.w1[input*m.hidden:][:m.hidden]),
			)
		}
	}
	addRows(g.b1, hidden, scale)
	return loss
}

// test returns the number of examples that the model classifies correctly, and the sum of the losses.
func (m *model) test(set examples) (right int, loss float64) {
	batch := make([]int, 0, m.capacity)
	for i := range set.Len() {
		batch = append(batch, i)
		if len(batch) < m.capacity && i < set.Len()-1 {
			continue
		}
		m.forward(set, batch)
		for row, example := range batch {
			p := m.row(row)
			label := set.Labels[example]
			loss += surprise(p[label])
			if p[label] == slices.Max(p) {
				right++
			}
		}
		batch = batch[:0]
	}
	return right, loss
}

// surprise is the loss of a label with probability p.
func surprise(p float32) float64 {
	return -math.Log(max(float64(p), math.SmallestNonzeroFloat32))
}

// row returns the class probabilities of the i-th example passed to forward.
func (m *model) row(i int) []float32 {
	return m.probabilities[i*m.classes : (i+1)*m.classes]
}

// forward computes the class probabilities of the given examples.
func (m *model) forward(set examples, batch []int) {
	n := len(batch)
	hidden := matrix(m.activation, n, m.hidden)
	setRows(hidden, m.layers.b1)
	if set.text == nil {
		for i, example := range batch {
			copy(m.input[i*m.inputs:], set.Image(example))
		}
		blas32.Gemm(
			blas.NoTrans,
			blas.NoTrans,
			1,
			matrix(m.input, n, m.inputs),
			matrix(m.layers.w1, m.inputs, m.hidden),
			1,
			hidden,
		)
	}
	for i, example := range batch { // the inputs of a text are 1 or 0
		for _, input := range set.context(example) {
			blas32.Axpy(
				1,
				vector(m.layers.w1[input*m.hidden:][:m.hidden]),
				vector(hidden.Data[i*m.hidden:][:m.hidden]),
			)
		}
	}
	for i, z := range hidden.Data {
		hidden.Data[i] = max(z, 0)
	}

	out := matrix(m.probabilities, n, m.classes)
	setRows(out, m.layers.b2)
	blas32.Gemm(blas.NoTrans, blas.NoTrans, 1, hidden, matrix(m.layers.w2, m.hidden, m.classes), 1, out)
	for i := range n {
		softmax(m.row(i))
	}
}

// softmax replaces logits by probabilities.
func softmax(z []float32) {
	highest := slices.Max(z)
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

// matrix views the first rows × columns values of data as a matrix in row order.
func matrix(data []float32, rows, columns int) blas32.General {
	return blas32.General{
		Rows:   rows,
		Cols:   columns,
		Stride: columns,
		Data:   data[:rows*columns],
	}
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
		blas32.Axpy(
			scale,
			vector(m.Data[i*m.Stride:][:m.Cols]),
			vector(sum[:m.Cols]),
		)
	}
}

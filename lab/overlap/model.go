package overlap

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/tutti-go/tutti/cmd/tutti/internal/attempt"
	"github.com/tutti-go/tutti/cmd/tutti/lab/cublas"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// product is one matrix product of a step.
type product struct {
	c        cublas.Matrix // the result, a·b
	a        cublas.Matrix // the first factor
	b        cublas.Matrix // the second factor
	kind     Kind          // Forward or Backward
	name     string        // in timelines
	gradient int           // the gradient that it completes; negative for none
}

// none marks a product that completes no gradient.
const none = -1

// model is the memory of a chain of linear layers y = x·wᵀ, and a step's products. The loss is the sum of the last
// layer's output divided by the world size. So the gradient of that output is the same on all ranks, and the sum of
// the ranks' gradients is their average.
type model struct {
	cfg      Config    // layers, sizes, pattern and seed
	products []product // of the forward pass, then of the backward pass
	flops    float64   // of all products

	// flat, in memory, holds the gradients of the weights, layer by layer. gradients are its registered parts: those
	// of the first layer, then one part for each other layer.
	// each other.
	memory *comm.Buffer
	// collective: all ranks free the memory together. A rank that fails alone leaves it to the communicator's Close,
	// because the others may be making another call.
	collective bool
	flat       *runtime.Tensor
	gradients  []*runtime.Tensor
	owned      []*runtime.Tensor
	// noise, for sparse patterns, are random numbers from which draw cuts gradients.
	noise uintptr
	drawn int // number of steps drawn
}

// newModel allocates a model and fills it. Random weights are the same on all ranks and in all layers; random inputs
// differ between ranks. The gradients are in memory for c.
func newModel(
	ctx context.Context,
	rt runtime.Runtime,
	c comm.Communicator,
	cfg Config,
	rank, ranks int,
) (*model, error) {
	_, symmetric := comm.As[comm.SymmetricAllocator](c)
	m := &model{cfg: cfg, collective: symmetric}
	err := m.allocate(ctx, rt, c)
	if err == nil {
		err = m.build(rt, rank, ranks)
	}
	if err != nil {
		return nil, errors.Join(err, m.free(ctx, m.collective))
	}
	return m, nil
}

// allocate allocates memory for the gradients.
func (m *model) allocate(ctx context.Context, rt runtime.Runtime, c comm.Communicator) (err error) {
	elements := m.cfg.Layers * m.cfg.Width * m.cfg.Width
	if m.memory, err = comm.Allocate(ctx, c, rt, elements*Element.Size()); err != nil {
		return err
	}
	m.flat, err = runtime.Wrap(rt, m.memory.Ptr, Element, []int{elements}, nil, nil)
	return err
}

func (m *model) build(rt runtime.Runtime, rank, ranks int) error {
	var a attempt.Calls
	matrices := func(count, rows, columns int) []cublas.Matrix {
		return attempt.Get(&a, func() ([]cublas.Matrix, error) {
			return m.newMatrices(rt, count, rows, columns)
		})
	}
	n := m.cfg.Batch
	d := m.cfg.Width
	weights := matrices(m.cfg.Layers, d, d)
	outputs := matrices(m.cfg.Layers+1, n, d) // output 0 is the input
	// The gradients of the outputs: the last one, then the others alternately.
	deltas := matrices(3, n, d)
	a.Do(func() error {
		return m.fill(rt, rank, weights, outputs[0])
	})
	if m.cfg.sparse() {
		noise := matrices(1, 1, d*d+noiseShifts*noiseShift)
		a.Do(func() error {
			m.noise = noise[0].Addr
			return fillRandom(rt, noise[0], rand.New(rand.NewPCG(m.cfg.Seed, uint64(rank+ranks)+1)).NormFloat64)
		})
	}
	a.Do(func() error {
		return rt.Fill(deltas[0].Addr, n*d, Element, 1/float64(ranks))
	})
	if a.Err != nil {
		return a.Err
	}
	delta := func(layer int) cublas.Matrix {
		if layer == m.cfg.Layers-1 {
			return deltas[0]
		}
		return deltas[1+layer%2]
	}
	for i, w := range weights {
		m.add(Forward, i, outputs[i+1], outputs[i], transposed(w), none)
	}
	parts := m.parts()
	for i := m.cfg.Layers - 1; i > 0; i-- {
		m.add(
			Backward,
			i,
			m.gradient(i, 0, d),
			transposed(delta(i)),
			outputs[i],
			parts+i-1,
		)
		m.add(Backward, i, delta(i-1), delta(i), weights[i], none)
	}
	// The gradient of the input is not needed. The parts are computed from last to first, in reverse order of
	// registration like all gradients.
	for p := parts - 1; p >= 0; p-- {
		from := p * d / parts
		to := (p + 1) * d / parts
		columns := delta(0)
		columns.Addr += uintptr(from * Element.Size())
		columns.Columns = to - from
		columns.Stride = d
		m.add(Backward, 0, m.gradient(0, from, to), transposed(columns), outputs[0], p)
	}
	return m.register(parts)
}

// A step's gradients are cut from the noise. Each step shifts the start by a number of elements, in a cycle.
const (
	noiseShift  = 8 // copies aligned to 16 bytes are the fastest
	noiseShifts = 4096
)

// draw replaces a gradient with random numbers if the pattern is sparse, new ones in every step. Products have the
// same results in all steps, so selected entries and thresholds would never be as in training.
func (m *model) draw(rt runtime.Runtime, gradient int) error {
	if m.noise == 0 {
		return nil
	}
	t := m.gradients[gradient]
	p, err := t.Ptr()
	if err != nil {
		return err
	}
	from := m.noise + uintptr(m.drawn%noiseShifts*noiseShift*Element.Size())
	return rt.Copy(p, from, t.Bytes())
}

// parts is the number of parts of the first layer's gradient.
func (m *model) parts() int {
	bytes := m.cfg.Width * m.cfg.Width * Element.Size()
	return min((bytes+m.cfg.BucketBytes-1)/m.cfg.BucketBytes, m.cfg.Width)
}

// register divides flat into the gradients.
func (m *model) register(parts int) error {
	d := m.cfg.Width
	var errs []error
	cut := func(from, to int) {
		part, err := m.flat.Slice(0, from*d, to*d)
		m.gradients = append(m.gradients, part)
		errs = append(errs, err)
	}
	for p := range parts {
		cut(p*d/parts, (p+1)*d/parts)
	}
	for i := 1; i < m.cfg.Layers; i++ {
		cut(i*d, (i+1)*d)
	}
	return errors.Join(errs...)
}

// add appends a product to the step.
func (m *model) add(kind Kind, layer int, c, a, b cublas.Matrix, gradient int) {
	name := fmt.Sprintf("%s %d", kind, layer)
	if gradient != none {
		name = fmt.Sprintf("gradient %d", layer)
	}
	m.products = append(m.products, product{
		c:        c,
		a:        a,
		b:        b,
		kind:     kind,
		name:     name,
		gradient: gradient,
	})
	inner := a.Columns
	if a.Transposed {
		inner = a.Rows
	}
	m.flops += 2 * float64(c.Rows) * float64(c.Columns) * float64(inner)
}

// gradient is a block of rows of a layer's gradient.
func (m *model) gradient(layer, from, to int) cublas.Matrix {
	d := m.cfg.Width
	return cublas.Matrix{
		Addr:    m.memory.Ptr + uintptr((layer*d+from)*d*Element.Size()),
		Rows:    to - from,
		Columns: d,
	}
}

func transposed(m cublas.Matrix) cublas.Matrix {
	m.Transposed = true
	return m
}

// newMatrices allocates matrices of one shape, which the model frees.
func (m *model) newMatrices(rt runtime.Runtime, count, rows, columns int) ([]cublas.Matrix, error) {
	all := make([]cublas.Matrix, count)
	for i := range all {
		t, err := runtime.New(rt, Element, rows*columns)
		if err != nil {
			return nil, err
		}
		m.owned = append(m.owned, t)
		addr, err := t.Ptr()
		if err != nil {
			return nil, err
		}
		all[i] = cublas.Matrix{
			Addr:    addr,
			Rows:    rows,
			Columns: columns,
		}
	}
	return all, nil
}

// fill sets weights and input. The weights have the distribution of PyTorch's linear layers, because a GPU's power
// and thus its speed depend on the values.
func (m *model) fill(rt runtime.Runtime, rank int, weights []cublas.Matrix, input cublas.Matrix) error {
	bound := 1 / math.Sqrt(float64(m.cfg.Width))
	shared := rand.New(rand.NewPCG(m.cfg.Seed, 0))
	if err := fillRandom(rt, weights[0], func() float64 {
		return bound * (2*shared.Float64() - 1)
	}); err != nil {
		return err
	}
	for _, w := range weights[1:] {
		if err := rt.Copy(w.Addr, weights[0].Addr, w.Rows*w.Columns*Element.Size()); err != nil {
			return err
		}
	}
	random := rand.New(rand.NewPCG(m.cfg.Seed, uint64(rank)+1))
	return fillRandom(rt, input, random.NormFloat64)
}

// fillChunk bounds the number of elements on the host at a time.
const fillChunk = 1 << 20

// fillRandom stores numbers from next in all elements of a matrix.
func fillRandom(rt runtime.Runtime, x cublas.Matrix, next func() float64) error {
	numbers := make([]float32, min(fillChunk, x.Rows*x.Columns))
	raw := make([]byte, len(numbers)*Element.Size())
	for start := 0; start < x.Rows*x.Columns; start += len(numbers) {
		n := min(len(numbers), x.Rows*x.Columns-start)
		for i := range n {
			numbers[i] = float32(next())
		}
		bytes := raw[:n*Element.Size()]
		if err := dtype.FromFloat32(bytes, Element, numbers[:n]); err != nil {
			return err
		}
		if err := rt.CopyIn(x.Addr+uintptr(start*Element.Size()), bytes); err != nil {
			return err
		}
	}
	return nil
}

// free frees the memory, except the gradients if keepGradients is set.
func (m *model) free(ctx context.Context, keepGradients bool) error {
	var errs []error
	for _, t := range m.owned {
		errs = append(errs, t.Free())
	}
	if m.memory != nil && !keepGradients {
		errs = append(errs, m.memory.Free(ctx))
	}
	return errors.Join(errs...)
}

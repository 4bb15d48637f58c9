package main

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// powerSGD is PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019). It sends a matrix M of gradient + residual as P·Qᵀ
// of a low rank, by one step of a power iteration from the last Q, and keeps the difference from this rank's M.
// Vectors, and matrices no larger than P and Q, are averaged without compression.
type powerSGD struct {
	parts       []part          // of the bucket
	residual, q *runtime.Tensor // q: the columns of all Q
	p           *runtime.Tensor // the columns of all P, and the uncompressed parts
}

// part is a gradient as a matrix, with the offsets of its factors. rank is 0 if it is averaged without compression.
type part struct{ offset, rows, columns, rank, p, q int }

// newPowerSGD returns the Reducer of a bucket of F32 in host memory.
func newPowerSGD(b ddp.Bucket, rank int) (ddp.Reducer, error) {
	s := &powerSGD{}
	p := 0
	q := 0
	for _, gradient := range b.Parts {
		n := 1
		for _, length := range gradient.Shape {
			n *= length
		}
		m := part{
			offset:  gradient.Offset,
			rows:    n,
			columns: 1,
			p:       p,
			q:       q,
		}
		if n > 0 && len(gradient.Shape) > 1 && rank*(gradient.Shape[0]+n/gradient.Shape[0]) < n {
			m.rows = gradient.Shape[0]
			m.columns = n / gradient.Shape[0]
			m.rank = rank
		}
		s.parts = append(s.parts, m)
		p = p + m.rows*max(1, m.rank)
		q = q + m.columns*m.rank
	}
	start := make([]float32, q) // the same on all ranks
	for random, i := rand.New(rand.NewPCG(uint64(b.Index), 0)), 0; i < q; i++ {
		start[i] = float32(random.NormFloat64())
	}
	var err, failed, wrong error
	s.residual, err = runtime.FromSlice(
		b.Tensor.Runtime(),
		make([]float32, b.Tensor.Len()),
		b.Tensor.Len(),
	)
	s.q, failed = runtime.FromSlice(b.Tensor.Runtime(), start, q)
	s.p, wrong = runtime.FromSlice(
		b.Tensor.Runtime(),
		make([]float32, p),
		p,
	)
	return s, errors.Join(err, failed, wrong)
}

// Memory implements [ddp.Reducer].
func (s *powerSGD) Memory() ddp.Memory {
	return ddp.Memory{
		Residual: []*runtime.Tensor{s.residual},
		Shared:   []*runtime.Tensor{s.q},
		Scratch:  []*runtime.Tensor{s.p},
	}
}

// Reduce implements [ddp.Reducer].
func (s *powerSGD) Reduce(ctx context.Context, b ddp.Bucket) error {
	var slices [4][]float32
	for i, t := range []*runtime.Tensor{b.Tensor, s.residual, s.p, s.q} {
		var err error
		if slices[i], err = cpu.Slice[float32](t); err != nil {
			return err
		}
	}
	x := slices[0]
	m := slices[1]
	p := slices[2]
	q := slices[3]
	for i := range x {
		m[i] += x[i]
		x[i] = 0
	}
	for _, part := range s.parts {
		if part.rank == 0 {
			copy(p[part.p:], m[part.offset:][:part.rows])
			clear(m[part.offset:][:part.rows])
		}
		for k := range part.rank { // P = M·Q
			for i := range part.rows {
				part.left(p, k)[i] = float32(dot(part.row(m, i), part.right(q, k)))
			}
		}
	}
	if err := distributed.AllReduce(ctx, b.Comm, s.p, comm.Avg); err != nil {
		return err
	}
	for _, part := range s.parts {
		if part.rank == 0 {
			copy(x[part.offset:], p[part.p:][:part.rows])
		}
		for k := range part.rank { // Q = Mᵀ·P
			if part.orthogonal(p, k) {
				clear(part.right(q, k)) // otherwise the next round tries again
			}
			for i, v := range part.left(p, k) {
				add(part.right(q, k), v, part.row(m, i))
			}
		}
		part.addProduct(m, -1, p, q)
	}
	err := distributed.AllReduce(ctx, b.Comm, s.q, comm.Avg)
	for _, part := range s.parts {
		part.addProduct(x, 1, p, q)
	}
	return err
}

func (m part) row(matrix []float32, i int) []float32 {
	return matrix[m.offset+i*m.columns:][:m.columns]
}
func (m part) left(p []float32, k int) []float32 {
	return p[m.p+k*m.rows:][:m.rows]
}
func (m part) right(q []float32, k int) []float32 {
	return q[m.q+k*m.columns:][:m.columns]
}

// orthogonal makes column k of P a unit vector orthogonal to the columns before it (Gram and Schmidt). If little but
// rounding is left of the column, it makes it 0 and returns false.
func (m part) orthogonal(p []float32, k int) bool {
	column := m.left(p, k)
	square := dot(column, column)
	for j := range k {
		add(
			column,
			-float32(dot(column, m.left(p, j))),
			m.left(p, j),
		)
	}
	remaining := dot(column, column)
	if remaining <= 1e-6*square {
		clear(column)
		return false
	}
	for i := range column {
		column[i] *= float32(1 / math.Sqrt(remaining))
	}
	return true
}

// addProduct adds sign·P·Qᵀ to a matrix in a bucket.
func (m part) addProduct(to []float32, sign float32, p, q []float32) {
	for k := range m.rank {
		for i, v := range m.left(p, k) {
			add(m.row(to, i), sign*v, m.right(q, k))
		}
	}
}

func dot(a, b []float32) (sum float64) {
	for i, x := range a {
		sum += float64(x) * float64(b[i]) // exact, whether fused or not
	}
	return sum
}

func add(to []float32, factor float32, x []float32) {
	for i, v := range x {
		to[i] += float32(factor * v) // not fused: the same bits on every processor
	}
}

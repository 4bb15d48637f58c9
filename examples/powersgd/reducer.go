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
)

// rank is that of the matrices that travel.
const rank = 4

// powerSGD averages matrices by factors of low rank, and all else as it is: one step of subspace
// iteration from the factors of the step before, with error feedback (Vogels, Karimireddy and Jaggi,
// "PowerSGD", NeurIPS 2019). It computes on the host.
type powerSGD struct {
	residual *runtime.Tensor // what was not sent
	right    *runtime.Tensor // the right factors, one matrix after the other
}

// matrix is a part of a bucket that is worth its factors.
type matrix struct{ offset, rows, columns int }

// matrices returns those of a bucket, and which elements are part of none.
func matrices(b ddp.Bucket) (all []matrix, rest []int) {
	for _, p := range b.Parts {
		n := 1
		for _, d := range p.Shape {
			n *= d
		}
		if len(p.Shape) > 1 && n > 0 {
			if m := (matrix{p.Offset, p.Shape[0], n / p.Shape[0]}); rank*(m.rows+m.columns) < n {
				all = append(all, m)
				continue
			}
		}
		for i := range n {
			rest = append(rest, p.Offset+i)
		}
	}
	return all, rest
}

func newPowerSGD(b ddp.Bucket) (ddp.Reducer, error) {
	var q []float32
	rng := rand.New(rand.NewPCG(1, uint64(b.Index))) // the same on all ranks
	all, _ := matrices(b)
	for _, m := range all {
		for range m.columns * rank {
			q = append(q, float32(rng.NormFloat64()))
		}
	}
	residual, err := runtime.FromSlice(b.Tensor.Runtime(), make([]float32, b.Tensor.Len()), b.Tensor.Len())
	right, err2 := runtime.FromSlice(b.Tensor.Runtime(), q, len(q))
	return &powerSGD{residual, right}, errors.Join(err, err2)
}

func (r *powerSGD) Memory() ddp.Memory {
	return ddp.Memory{Residual: []*runtime.Tensor{r.residual}, Shared: []*runtime.Tensor{r.right}}
}

func (r *powerSGD) Reduce(ctx context.Context, b ddp.Bucket) error {
	x, err := runtime.ToSlice[float32](b.Tensor)
	residual, err2 := runtime.ToSlice[float32](r.residual)
	right, err3 := runtime.ToSlice[float32](r.right)
	if err := errors.Join(err, err2, err3); err != nil {
		return err
	}
	for i := range x {
		x[i] += residual[i]
	}
	all, rest := matrices(b)
	var p []float32 // the left factors, and what is no matrix
	q := right
	for _, m := range all {
		p = append(p, product(x[m.offset:], q, m.rows, m.columns, m.columns, 1)...)
		q = q[m.columns*rank:]
	}
	for _, i := range rest {
		p = append(p, x[i])
	}
	if err := average(ctx, b, p); err != nil {
		return err
	}
	left := p
	right = nil
	for _, m := range all {
		orthogonalize(left, m.rows)
		right = append(right, product(x[m.offset:], left, m.columns, m.rows, 1, m.columns)...)
		left = left[m.rows*rank:]
	}
	if err := average(ctx, b, right); err != nil {
		return err
	}
	copy(residual, x)
	left, q = p, right
	for _, m := range all {
		for i := range m.rows {
			for j := range m.columns {
				sum := float32(0)
				for k := range rank {
					sum += left[i*rank+k] * q[j*rank+k]
				}
				x[m.offset+i*m.columns+j] = sum
			}
		}
		left, q = left[m.rows*rank:], q[m.columns*rank:]
	}
	for i, at := range rest {
		x[at], residual[at] = left[i], left[i]
	}
	for i := range x {
		residual[i] -= x[i]
	}
	return errors.Join(runtime.CopyIn(b.Tensor, x), runtime.CopyIn(r.residual, residual), runtime.CopyIn(r.right, right))
}

// product returns a matrix times a factor. Its element i, j is at i*down + j*right.
func product(m, factor []float32, rows, columns, down, right int) []float32 {
	out := make([]float32, rows*rank)
	for i := range rows {
		for j := range columns {
			for k := range rank {
				out[i*rank+k] += m[i*down+j*right] * factor[j*rank+k]
			}
		}
	}
	return out
}

// orthogonalize makes the columns of a factor orthonormal (Gram and Schmidt).
func orthogonalize(p []float32, rows int) {
	for k := range rank {
		for other := range k {
			dot := 0.0
			for i := range rows {
				dot += float64(p[i*rank+k]) * float64(p[i*rank+other])
			}
			for i := range rows {
				p[i*rank+k] -= float32(dot) * p[i*rank+other]
			}
		}
		norm := 1e-30
		for i := range rows {
			norm += float64(p[i*rank+k]) * float64(p[i*rank+k])
		}
		for i := range rows {
			p[i*rank+k] /= float32(math.Sqrt(norm))
		}
	}
}

// average averages numbers of the host over the ranks.
func average(ctx context.Context, b ddp.Bucket, x []float32) error {
	t, err := runtime.FromSlice(b.Tensor.Runtime(), x, len(x))
	if err != nil {
		return err
	}
	defer t.Free()
	if err := errors.Join(distributed.AllReduce(ctx, b.Comm, t, comm.Avg), b.Comm.Sync(ctx)); err != nil {
		return err
	}
	return runtime.CopyOut(x, t)
}

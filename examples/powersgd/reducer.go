package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

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
	residual, before []float32 // what was not sent, now and before the step
	q, qBefore       []float32 // the right factors, one matrix after the other
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
	r := &powerSGD{residual: make([]float32, b.Tensor.Len())}
	rng := rand.New(rand.NewPCG(1, uint64(b.Index))) // the same on all ranks
	all, _ := matrices(b)
	for _, m := range all {
		for range m.columns * rank {
			r.q = append(r.q, float32(rng.NormFloat64()))
		}
	}
	return r, nil
}

func (r *powerSGD) Reduce(ctx context.Context, b ddp.Bucket) error {
	r.before, r.qBefore = slices.Clone(r.residual), slices.Clone(r.q)
	x, err := runtime.ToSlice[float32](b.Tensor)
	if err != nil {
		return err
	}
	for i := range x {
		x[i] += r.residual[i]
	}
	all, rest := matrices(b)
	var p []float32 // the left factors, and what is no matrix
	q := r.q
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
	r.q = r.q[:0]
	for _, m := range all {
		orthogonalize(left, m.rows)
		r.q = append(r.q, product(x[m.offset:], left, m.columns, m.rows, 1, m.columns)...)
		left = left[m.rows*rank:]
	}
	if err := average(ctx, b, r.q); err != nil {
		return err
	}
	copy(r.residual, x)
	left, q = p, r.q
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
		x[at], r.residual[at] = left[i], left[i]
	}
	for i := range x {
		r.residual[i] -= x[i]
	}
	return runtime.CopyIn(b.Tensor, x)
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
	if err := distributed.AllReduce(ctx, b.Comm, t, comm.Avg); err != nil {
		return err
	}
	if err := b.Comm.Sync(ctx); err != nil {
		return err
	}
	return runtime.CopyOut(x, t)
}

func (r *powerSGD) Commit() error { return nil }

func (r *powerSGD) RollBack() error {
	r.residual, r.q = r.before, r.qBefore
	return nil
}

func (r *powerSGD) State(context.Context) ([]byte, error) {
	return binary.Append(nil, binary.LittleEndian, slices.Concat(r.q, r.residual))
}

// Restore adds residuals up where there are fewer ranks than before, so that nothing gets lost.
func (r *powerSGD) Restore(_ context.Context, states ...[]byte) error {
	x := make([]float32, len(r.q)+len(r.residual))
	clear(r.residual)
	for _, state := range states {
		if n, err := binary.Decode(state, binary.LittleEndian, x); err != nil || n != len(state) {
			return fmt.Errorf("%w: a state of %d bytes, want %d", comm.ErrArgument, len(state), 4*len(x))
		}
		copy(r.q, x)
		for i := range r.residual {
			r.residual[i] += x[len(r.q)+i]
		}
	}
	return nil
}

func (r *powerSGD) Rebind(comm.Communicator) error { return nil }
func (r *powerSGD) Close() error                   { return nil }

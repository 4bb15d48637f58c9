package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// randomK averages a random tenth of a bucket in each step, in one piece, the same on all
// ranks, and keeps the rest for later ones (random-k with error feedback: Stich, Cordonnier and
// Jaggi, "Sparsified SGD with Memory", NeurIPS 2018).
type randomK struct {
	steps            uint64
	residual, before *runtime.Tensor // what was not sent, now and before the step
}

func newRandomK(b ddp.Bucket) (ddp.Reducer, error) {
	r, rt, n := new(randomK), b.Tensor.Runtime(), b.Tensor.Len()
	for _, t := range []**runtime.Tensor{&r.residual, &r.before} {
		var err error
		if *t, err = runtime.New(rt, dtype.F32, n); err == nil {
			err = (*t).Fill(0)
		}
		if err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (r *randomK) Reduce(ctx context.Context, b ddp.Bucket) error {
	const pieces = 10
	n, piece := b.Tensor.Len(), rand.New(rand.NewPCG(r.steps, uint64(b.Index))).IntN(pieces)
	r.residual, r.before = r.before, r.residual
	r.steps++
	kernels, err := runtime.KernelsOf(b.Tensor.Runtime())
	if err != nil || n == 0 {
		return err
	}
	residual, _ := r.residual.Ptr()
	before, _ := r.before.Ptr()
	gradient, _ := b.Tensor.Ptr()
	err = kernels.Accumulate(runtime.Source{X: residual, N: n, From: before, Grad: gradient, DType: b.Tensor.DType()})
	sent, err2 := b.Tensor.Slice(0, piece*n/pieces, (piece+1)*n/pieces)
	kept, err3 := r.residual.Slice(0, piece*n/pieces, (piece+1)*n/pieces)
	if err = errors.Join(err, err2, err3); err == nil {
		err = errors.Join(b.Tensor.Fill(0), sent.CopyFrom(kept), kept.Fill(0)) // of F32
	}
	if err != nil {
		return err
	}
	return distributed.AllReduce(ctx, b.Comm, sent, comm.Avg)
}

func (r *randomK) Commit() error { return nil }

func (r *randomK) RollBack() error {
	r.residual, r.before = r.before, r.residual
	r.steps--
	return nil
}

func (r *randomK) State(context.Context) ([]byte, error) {
	residual, err := runtime.ToSlice[float32](r.residual)
	if err != nil {
		return nil, err
	}
	return binary.Append(nil, binary.LittleEndian, append([]float32{float32(r.steps)}, residual...))
}

// Restore adds residuals up where there are fewer ranks than before, so that nothing gets lost.
func (r *randomK) Restore(_ context.Context, states ...[]byte) error {
	sum, x := make([]float32, r.residual.Len()), make([]float32, 1+r.residual.Len())
	for _, state := range states {
		if n, err := binary.Decode(state, binary.LittleEndian, x); err != nil || n != len(state) {
			return fmt.Errorf("%w: a state of %d bytes, want %d: %w", comm.ErrArgument, len(state), 4*len(x), err)
		}
		for i := range sum {
			sum[i] += x[1+i]
		}
	}
	r.steps = uint64(x[0])
	return runtime.CopyIn(r.residual, sum)
}

func (r *randomK) Rebind(comm.Communicator) error { return nil }

func (r *randomK) Close() error { return errors.Join(r.residual.Free(), r.before.Free()) }

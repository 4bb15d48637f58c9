package main

import (
	"context"
	"errors"
	"math/rand/v2"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// randomK averages a random tenth of a bucket in each step, in one piece, the same on all
// ranks, and keeps the rest for later ones (random-k with error feedback: Stich, Cordonnier and
// Jaggi, "Sparsified SGD with Memory", NeurIPS 2018). Gradients are F32.
type randomK struct{ residual *runtime.Tensor }

func newRandomK(b ddp.Bucket) (ddp.Reducer, error) {
	residual, err := runtime.New(b.Tensor.Runtime(), dtype.F32, b.Tensor.Len())
	if err != nil {
		return nil, err
	}
	return randomK{residual}, residual.Fill(0)
}

func (r randomK) Memory() ddp.Memory { return ddp.Memory{Residual: []*runtime.Tensor{r.residual}} }

func (r randomK) Reduce(ctx context.Context, b ddp.Bucket) error {
	const pieces = 10
	n, piece := b.Tensor.Len(), rand.New(rand.NewPCG(uint64(b.Step), uint64(b.Index))).IntN(pieces)
	kernels, err := runtime.KernelsOf(b.Tensor.Runtime())
	if err != nil || n == 0 {
		return err
	}
	residual, _ := r.residual.Ptr()
	gradient, _ := b.Tensor.Ptr()
	err = kernels.Accumulate(runtime.Source{X: residual, N: n, Grad: gradient, DType: dtype.F32})
	sent, err2 := b.Tensor.Slice(0, piece*n/pieces, (piece+1)*n/pieces)
	kept, err3 := r.residual.Slice(0, piece*n/pieces, (piece+1)*n/pieces)
	if err = errors.Join(err, err2, err3); err == nil {
		err = errors.Join(b.Tensor.Fill(0), sent.CopyFrom(kept), kept.Fill(0))
	}
	if err != nil {
		return err
	}
	return distributed.AllReduce(ctx, b.Comm, sent, comm.Avg)
}

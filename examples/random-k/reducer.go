package main

import (
	"context"
	"errors"
	"math/rand/v2"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// randomK sends k entries of gradient + residual in a step, the same ones on all ranks: one of each
// of k equal parts of the bucket, at random. The others stay in the residual (Stich, Cordonnier, Jaggi,
// "Sparsified SGD with Memory", NeurIPS 2018).
type randomK struct {
	residual *runtime.Tensor
	sent     *runtime.Tensor // the first k elements of the bucket's tensor
	at       []int           // where they belong, ascending
	random   rand.PCG
}

// newRandomK returns the Reducer of a bucket of F32 in host memory, of which it sends a share.
func newRandomK(b ddp.Bucket, density float64) (ddp.Reducer, error) {
	n := b.Tensor.Len()
	k := min(max(1, int(density*float64(n))), n)
	sent, err := b.Tensor.Slice(0, 0, k)
	residual, failed := runtime.FromSlice(b.Tensor.Runtime(), make([]float32, n), n)
	return &randomK{residual: residual, sent: sent, at: make([]int, k)}, errors.Join(err, failed)
}

// Memory implements [ddp.Reducer].
func (r *randomK) Memory() ddp.Memory { return ddp.Memory{Residual: []*runtime.Tensor{r.residual}} }

// Reduce implements [ddp.Reducer].
func (r *randomK) Reduce(ctx context.Context, b ddp.Bucket) error {
	x, wrong := cpu.Slice[float32](b.Tensor)
	residual, err := cpu.Slice[float32](r.residual)
	if err := errors.Join(wrong, err); err != nil {
		return err
	}
	for i := range x {
		residual[i], x[i] = residual[i]+x[i], 0
	}
	r.random.Seed(uint64(b.Index), uint64(b.Step))
	for i, k := 0, len(r.at); i < k; i++ {
		from, to := i*len(x)/k, (i+1)*len(x)/k
		at := from + int(r.random.Uint64()%uint64(to-from))
		r.at[i], x[i], residual[at] = at, residual[at], 0
	}
	err = distributed.AllReduce(ctx, b.Comm, r.sent, comm.Avg)
	for i := len(r.at) - 1; i >= 0; i-- { // at[i] is at least i
		average := x[i]
		x[i], x[r.at[i]] = 0, average
	}
	return err
}

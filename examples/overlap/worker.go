package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/cublas"
	"github.com/tutti-go/tutti/internal/overlap"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// demonstrate runs both ways on one rank.
func demonstrate(ctx context.Context, c *nccl.Comm) (timelines []overlap.Timeline, err error) {
	rt := c.Runtime()
	gpu, err := overlap.NewGPU(rt)
	if err != nil {
		return nil, err
	}
	w := &worker{comm: c, rt: rt, gpu: gpu, trace: overlap.NewTrace(gpu)}
	defer func() { err = errors.Join(err, w.trace.Close(), gpu.Close()) }()
	defer func() { err = w.free(ctx, err) }()
	if err := w.allocate(ctx); err != nil {
		return nil, err
	}
	// Products leave the multiprocessors free that the communicator takes.
	if err := gpu.SetMultiprocessors(rt.Info().Multiprocessors - ctas); err != nil {
		return nil, err
	}
	if w.reducer, err = newReducer(c, rt.ComputeStream()); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.reducer.close()) }()

	for _, name := range []string{sequential, overlapped} {
		for range 2 { // the first warms up
			if err := w.step(ctx, name == overlapped); err != nil {
				return nil, err
			}
		}
		t, err := w.trace.Timeline(name)
		if err != nil {
			return nil, err
		}
		timelines = append(timelines, t)
	}
	return timelines, nil
}

// The two ways.
const (
	sequential = "one after the other"
	overlapped = "overlapped"
)

// worker is one rank.
type worker struct {
	comm      *nccl.Comm
	rt        *cuda.Runtime
	gpu       *overlap.GPU // multiplies by cuBLAS
	reducer   *reducer
	trace     *overlap.Trace
	outputs   cublas.Matrix // how the loss changes with a layer's outputs
	inputs    cublas.Matrix // of a layer
	gradients [layers]cublas.Matrix

	factors, sums uintptr // where the matrices lie
}

// allocate makes the matrices: factors in memory of the GPU, gradients in memory
// on which the communicator is faster, above all with few thread blocks.
func (w *worker) allocate(ctx context.Context) (err error) {
	const factor, gradient = batch * width, width * width
	size := dtype.BF16.Size()
	if w.factors, err = w.rt.Allocate(2 * factor * size); err != nil {
		return err
	}
	if w.sums, err = w.comm.AllocateSymmetric(ctx, layers*gradient*size); err != nil {
		return err
	}
	w.outputs = cublas.Matrix{Addr: w.factors, Rows: batch, Columns: width}
	w.inputs = cublas.Matrix{Addr: w.factors + uintptr(factor*size), Rows: batch, Columns: width}
	for i := range w.gradients {
		w.gradients[i] = cublas.Matrix{Addr: w.sums + uintptr(i*gradient*size), Rows: width, Columns: width}
	}
	return w.rt.Fill(w.factors, 2*factor, dtype.BF16, 0.01)
}

// free frees the matrices after err or nil, and returns what went wrong. All
// ranks free symmetric memory together: after an error, this one does not wait
// for others, which may be waiting for it.
func (w *worker) free(ctx context.Context, err error) error {
	if err != nil {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		ctx = ended
	}
	freeErr := errors.Join(w.rt.Deallocate(w.factors), w.comm.FreeSymmetric(ctx, w.sums))
	if err != nil {
		return err // what came of it is no news
	}
	return freeErr
}

// step computes and adds up all gradients. The two ways differ in one thing:
// whether the compute stream waits for each reduction, or for all at the end.
func (w *worker) step(ctx context.Context, overlapped bool) error {
	if err := w.comm.Barrier(ctx); err != nil {
		return err
	}
	if err := w.trace.Begin(w.comm, w.rt.ComputeStream()); err != nil {
		return err
	}
	for i := range w.gradients {
		if err := w.layer(i); err != nil {
			return err
		}
		if !overlapped {
			if err := w.reducer.wait(); err != nil {
				return err
			}
		}
	}
	if err := w.reducer.wait(); err != nil {
		return err
	}
	if err := w.trace.End(); err != nil {
		return err
	}
	return errors.Join(w.comm.Sync(ctx), w.rt.Synchronize(ctx))
}

// layer computes a gradient and adds up the ranks' as soon as it is there.
func (w *worker) layer(i int) error {
	gradient, outputs := w.gradients[i], w.outputs
	outputs.Transposed = true
	if err := w.gpu.Multiply(gradient, outputs, w.inputs); err != nil {
		return err
	}
	if err := w.trace.Computed(overlap.Backward, fmt.Sprintf("gradient %d", i)); err != nil {
		return err
	}
	if err := w.reducer.add(gradient.Addr, width*width, dtype.BF16); err != nil {
		return err
	}
	return w.trace.Reduced(fmt.Sprintf("allreduce %d", i))
}

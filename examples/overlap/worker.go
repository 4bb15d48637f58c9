package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// A layer's gradient is a matrix of width rows and columns.
const (
	layers = 16
	batch  = 128
	width  = 4096
	count  = width * width // elements of a gradient
)

// gradientPTX is the kernel that computes a gradient, gradient.cu.
//
//go:embed gradient.ptx
var gradientPTX []byte

// A way to do a step.
type way int

const (
	computeOnly way = iota // gradients, which nobody adds up
	reduceOnly             // sums, of what lies there
	sequential             // the compute stream waits for each sum
	overlapped             // it waits for all sums, once
	ways
)

var wayNames = [ways]string{
	computeOnly: "computing",
	reduceOnly:  "reducing",
	sequential:  "one after the other",
	overlapped:  "overlapped",
}

// times are how long a step takes each way, by the device's clock.
type times [ways]time.Duration

// worker is one rank.
type worker struct {
	comm       *nccl.Comm
	rt         *cuda.Runtime
	reducer    *reducer
	begin, end *cuda.Event
	module     *cuda.Module
	kernel     *cuda.Kernel
	delta      *runtime.Tensor // what gradients are computed from: of the outputs,
	input      *runtime.Tensor // and the inputs
	gradients  uintptr         // all of them, one after the other
}

// demonstrate measures every way on one rank.
func demonstrate(ctx context.Context, c *nccl.Comm) (t times, err error) {
	w := &worker{comm: c, rt: c.Runtime()}
	if err := w.open(ctx); err != nil {
		return t, err
	}
	for way := range ways {
		for range 2 { // the first warms up
			if t[way], err = w.step(ctx, way); err != nil {
				return t, err
			}
		}
	}
	return t, errors.Join(w.check(), w.close(ctx))
}

// open makes what the rank needs. The gradients lie in memory on which the
// communicator is faster, above all with few thread blocks.
func (w *worker) open(ctx context.Context) (err error) {
	if w.reducer, err = newReducer(w.comm, w.rt.ComputeStream()); err != nil {
		return err
	}
	if w.begin, err = w.rt.NewTimingEvent(); err != nil {
		return err
	}
	if w.end, err = w.rt.NewTimingEvent(); err != nil {
		return err
	}
	if w.module, err = w.rt.LoadModule(gradientPTX); err != nil {
		return err
	}
	if w.kernel, err = w.module.Kernel("weight_gradient"); err != nil {
		return err
	}
	delta, input := make([]float32, batch*width), make([]float32, batch*width)
	for i := range delta {
		delta[i], input[i] = outputGradient(w.comm.Rank(), i%width), inputValue(i%width)
	}
	if w.delta, err = runtime.FromSlice(w.rt, delta, batch, width); err != nil {
		return err
	}
	if w.input, err = runtime.FromSlice(w.rt, input, batch, width); err != nil {
		return err
	}
	w.gradients, err = w.comm.AllocateSymmetric(ctx, layers*count*dtype.F32.Size())
	return err
}

// outputGradient and inputValue are small whole numbers, so that sums are exact.
func outputGradient(rank, output int) float32 { return float32(output%7 + rank) }
func inputValue(input int) float32            { return float32(input % 5) }

// close gives back what open made. After an error it is left to the Close of the
// communicator and of the runtime: ranks free symmetric memory together, and the
// others may be waiting for this one somewhere else.
func (w *worker) close(ctx context.Context) error {
	return errors.Join(w.comm.FreeSymmetric(ctx, w.gradients), w.input.Free(), w.delta.Free(), w.module.Close(),
		w.end.Close(), w.begin.Close())
}

// step submits the gradients and their sums, and measures.
func (w *worker) step(ctx context.Context, how way) (time.Duration, error) {
	err := errors.Join(w.comm.Barrier(ctx), w.rt.Stream().Record(w.begin))
	for i := range layers {
		err = errors.Join(err, w.layer(i, how))
	}
	err = errors.Join(err, w.reducer.wait(), w.rt.Stream().Record(w.end), w.comm.Sync(ctx), w.rt.Synchronize(ctx))
	if err != nil {
		return 0, err
	}
	return w.end.Since(w.begin)
}

// layer computes a gradient and adds up the ranks' as soon as it is there.
func (w *worker) layer(i int, how way) error {
	gradient := w.gradients + uintptr(i*count*dtype.F32.Size())
	var err error
	if how != reduceOnly {
		err = w.compute(gradient)
	}
	if how != computeOnly {
		err = errors.Join(err, w.reducer.add(gradient, count, dtype.F32))
	}
	if how == sequential {
		err = errors.Join(err, w.reducer.wait())
	}
	return err
}

// compute submits the computation of a gradient to the compute stream.
func (w *worker) compute(gradient uintptr) error {
	delta, err := w.delta.Ptr()
	input, failed := w.input.Ptr()
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	const threads = 256
	return w.kernel.Launch(w.rt.Stream(), cuda.Geometry{Grid: cuda.Dim{X: width / threads, Y: width}, Block: cuda.Dim{X: threads}},
		uint64(gradient), uint64(delta), uint64(input), batch, width)
}

// check looks at the sums of the last step.
func (w *worker) check() error {
	sums, err := w.rt.WrapTensor(w.gradients, dtype.F32, []int{layers * count}, nil, nil)
	if err != nil {
		return err
	}
	got, err := runtime.ToSlice[float32](sums)
	if err != nil {
		return err
	}
	for i, sum := range got {
		row, column := i%count/width, i%width
		want := float32(0)
		for r := range w.comm.WorldSize() {
			want += batch * outputGradient(r, row) * inputValue(column)
		}
		if sum != want {
			return fmt.Errorf("row %d, column %d of gradient %d is %v, want %v", row, column, i/count, sum, want)
		}
	}
	return nil
}

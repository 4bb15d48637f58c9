package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// A layer's gradient is a matrix with width rows and columns.
const (
	layers = 16
	batch  = 128
	width  = 4096
	count  = width * width // elements of a gradient
)

// gradientPTX is the compiled kernel that computes a gradient, gradient.cu.
//
//go:embed gradient.ptx
var gradientPTX []byte

// worker is one rank.
type worker struct {
	comm      *nccl.Comm      // of this GPU
	rt        *cuda.Runtime   // the GPU
	reducer   *reducer        // orders the streams
	kernel    *cuda.Kernel    // computes gradients
	delta     *runtime.Tensor // the gradient of the outputs,
	input     *runtime.Tensor // and the inputs, from which gradients are computed
	gradients uintptr         // all gradients, one after the other

	begin    *cuda.Event   // of a step
	computed []*cuda.Event // on the compute stream, when a gradient is complete
	reduced  []*cuda.Event // on the communicator's stream, when its sum is complete
}

// demonstrate makes a step each way on one rank. Its memory is freed with the runtime and the communicator.
func demonstrate(ctx context.Context, c *nccl.Comm) ([]step, error) {
	w := &worker{comm: c, rt: c.Runtime()}
	if err := w.open(ctx); err != nil {
		return nil, err
	}
	steps := make([]step, ways)
	for mode := range ways {
		for range 2 { // the first warms up
			var err error
			if steps[mode], err = w.step(ctx, mode); err != nil {
				return nil, err
			}
		}
	}
	return steps, w.check()
}

// open makes the rank's state. The gradients are in memory on which the communicator is faster, above all with few
// thread blocks.
func (w *worker) open(ctx context.Context) (err error) {
	if w.reducer, err = newReducer(w.comm, w.rt.ComputeStream()); err != nil {
		return err
	}
	module, err := w.rt.LoadModule(gradientPTX)
	if err != nil {
		return err
	}
	if w.kernel, err = module.Kernel("weight_gradient"); err != nil {
		return err
	}
	delta := slices.Repeat([]float32{float32(w.comm.Rank() + 1)}, batch*width)
	if w.delta, err = runtime.FromSlice(w.rt, delta, batch, width); err != nil {
		return err
	}
	input := slices.Repeat([]float32{1}, batch*width)
	if w.input, err = runtime.FromSlice(w.rt, input, batch, width); err != nil {
		return err
	}
	events := make([]*cuda.Event, 1+2*layers)
	for i := range events {
		if events[i], err = w.rt.NewTimingEvent(); err != nil {
			return err
		}
	}
	w.begin = events[0]
	w.computed = events[1 : 1+layers]
	w.reduced = events[1+layers:]
	w.gradients, err = w.comm.AllocateSymmetric(ctx, layers*count*dtype.F32.Size())
	return err
}

// step submits the gradients and their sums, and returns when each was complete.
func (w *worker) step(ctx context.Context, mode way) (step, error) {
	if err := w.comm.Barrier(ctx); err != nil {
		return step{}, err
	}
	if err := w.rt.Stream().Record(w.begin); err != nil {
		return step{}, err
	}
	for i := range layers {
		if err := w.layer(i, mode); err != nil {
			return step{}, err
		}
	}
	if err := w.reducer.wait(); err != nil {
		return step{}, err
	}
	if err := errors.Join(w.comm.Sync(ctx), w.rt.Synchronize(ctx)); err != nil {
		return step{}, err
	}
	computed, err := w.elapsed(w.computed)
	if err != nil {
		return step{}, err
	}
	reduced, err := w.elapsed(w.reduced)
	return newStep(mode, computed, reduced), err
}

// layer computes a gradient and sums it over the ranks as soon as it is complete.
func (w *worker) layer(i int, mode way) error {
	gradient := w.gradients + uintptr(i*count*dtype.F32.Size())
	if mode != reduceOnly {
		if err := w.compute(gradient); err != nil {
			return err
		}
	}
	if err := w.rt.Stream().Record(w.computed[i]); err != nil {
		return err
	}
	if mode != computeOnly {
		if err := w.reducer.add(gradient, count, dtype.F32); err != nil {
			return err
		}
	}
	if err := w.comm.Stream().Record(w.reduced[i]); err != nil {
		return err
	}
	if mode == sequential {
		return w.reducer.wait()
	}
	return nil
}

// compute submits the computation of a gradient to the compute stream.
func (w *worker) compute(gradient uintptr) error {
	delta, err := w.delta.Ptr()
	if err != nil {
		return err
	}
	input, err := w.input.Ptr()
	if err != nil {
		return err
	}
	const threads = 256
	geometry := cuda.Geometry{
		Grid:  cuda.Dim{X: width / threads, Y: width},
		Block: cuda.Dim{X: threads},
	}
	return w.kernel.Launch(w.rt.Stream(), geometry, uint64(gradient), uint64(delta), uint64(input), batch, width)
}

// elapsed returns the GPU's times from the beginning of a step to events.
func (w *worker) elapsed(events []*cuda.Event) ([]time.Duration, error) {
	times := make([]time.Duration, len(events))
	for i, e := range events {
		var err error
		if times[i], err = e.Since(w.begin); err != nil {
			return nil, err
		}
	}
	return times, nil
}

// check verifies the sums of the last step.
func (w *worker) check() error {
	sums, err := w.rt.WrapTensor(w.gradients, dtype.F32, []int{layers * count}, nil, nil)
	if err != nil {
		return err
	}
	got, err := runtime.ToSlice[float32](sums)
	if err != nil {
		return err
	}
	ranks := w.comm.WorldSize()
	want := float32(batch * ranks * (ranks + 1) / 2)
	if i := slices.IndexFunc(got, func(v float32) bool { return v != want }); i >= 0 {
		return fmt.Errorf("element %d of gradient %d is %v, want %v", i%count, i/count, got[i], want)
	}
	return nil
}

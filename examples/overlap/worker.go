package main

import (
	"context"
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
	width  = 4096
	count  = width * width // elements of a gradient
)

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
	factors    uintptr // what gradients are computed from
	gradients  uintptr // all of them, one after the other
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
	if w.factors, err = w.rt.Allocate(count * dtype.F32.Size()); err != nil {
		return err
	}
	if w.gradients, err = w.comm.AllocateSymmetric(ctx, layers*count*dtype.F32.Size()); err != nil {
		return err
	}
	return w.rt.Fill(w.factors, count, dtype.F32, 0.5)
}

// close gives back what open made. After an error it is left to the Close of the
// communicator and of the runtime: ranks free symmetric memory together, and the
// others may be waiting for this one somewhere else.
func (w *worker) close(ctx context.Context) error {
	return errors.Join(w.comm.FreeSymmetric(ctx, w.gradients), w.rt.Deallocate(w.factors),
		w.end.Close(), w.begin.Close(), w.reducer.close())
}

// step submits the gradients and their sums, and measures.
func (w *worker) step(ctx context.Context, how way) (time.Duration, error) {
	if err := w.comm.Barrier(ctx); err != nil {
		return 0, err
	}
	if err := w.rt.Stream().Record(w.begin); err != nil {
		return 0, err
	}
	for i := range layers {
		if err := w.layer(i, how); err != nil {
			return 0, err
		}
	}
	if err := w.reducer.wait(); err != nil {
		return 0, err
	}
	if err := w.rt.Stream().Record(w.end); err != nil {
		return 0, err
	}
	if err := errors.Join(w.comm.Sync(ctx), w.rt.Synchronize(ctx)); err != nil {
		return 0, err
	}
	return w.end.Since(w.begin)
}

// layer computes a gradient and adds up the ranks' as soon as it is there.
func (w *worker) layer(i int, how way) error {
	gradient := w.gradients + uintptr(i*count*dtype.F32.Size())
	if how != reduceOnly {
		if err := w.compute(gradient); err != nil {
			return err
		}
	}
	if how != computeOnly {
		if err := w.reducer.add(gradient, count, dtype.F32); err != nil {
			return err
		}
	}
	if how == sequential {
		return w.reducer.wait()
	}
	return nil
}

// compute submits the computation of a gradient: a copy.
func (w *worker) compute(gradient uintptr) error {
	return w.rt.Copy(gradient, w.factors, count*dtype.F32.Size())
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
	want := 0.5 * float32(w.comm.WorldSize())
	for i, sum := range got {
		if sum != want {
			return fmt.Errorf("element %d of gradient %d is %v, want %v", i%count, i/count, sum, want)
		}
	}
	return nil
}

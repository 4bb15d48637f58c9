package distributed

import (
	"context"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// wordSize is the size of what travels: F32 values, I32 indices and lengths.
const wordSize = 4

// tiny is the smallest magnitude above zero.
const tiny = math.SmallestNonzeroFloat32

// engine is what selectors and exchanges share: one rank's view of the tensor
// being reduced, the kernels and the communicator.
//
// Its first error sticks, as in a bufio.Writer: later methods do nothing and
// return zeros, so that an algorithm reads as what it does. Whoever runs a
// step looks at err at its end.
type engine struct {
	rt      runtime.Runtime
	kernels runtime.Kernels
	c       comm.Communicator
	order   order
	cfg     Config
	err     error

	rank, size int
	n          int
	k          int     // how many entries a rank is to pick
	average    float32 // 1/P
	residual   uintptr // n F32: what was not sent yet

	target          gradient // of the step: where the result goes
	scratch         buffer   // for a dense result, where that is not F32
	globalThreshold float32  // of oktopk

	numbers
	buffers   []*buffer
	permanent int // buffers[:permanent] live until close
	group     []comm.Call
}

func newEngine(rt runtime.Runtime, kernels runtime.Kernels, c comm.Communicator, n int, cfg Config) (*engine, error) {
	e := &engine{rt: rt, kernels: kernels, c: c, cfg: cfg, n: n, rank: c.Rank(), size: c.WorldSize(), order: newOrder(rt, c)}
	e.average = 1 / float32(e.size)
	e.prepareNumbers()
	return e, e.err
}

// close gives all device memory back, if the communicator is done with it. Its
// errors are not those of a step.
func (e *engine) close() error {
	e.err = e.order.settle()
	if e.err == nil {
		e.release(0)
	}
	return e.err
}

// check makes err stick if it is the first.
func (e *engine) check(err error) {
	if e.err == nil {
		e.err = err
	}
}

// array is an array of n elements that the indices of lists point into.
func (e *engine) array(p uintptr) runtime.Array {
	return runtime.Array{Ptr: p, N: e.n, Faults: e.at(numFaults)}
}

// source is the residual, to which a gradient is added on the way, to select
// from. What is selected is taken out of it.
func (e *engine) source(g gradient) runtime.Source {
	return runtime.Source{X: e.residual, N: e.n, Grad: g.ptr, DType: g.dt, Factor: g.factor, Take: true}
}

// gradient is what a step adds to the residual.
type gradient struct {
	ptr    uintptr
	dt     dtype.DType
	factor uintptr // of an F32, 0 for none
}

// dense is memory for a dense result: the gradient, which is in the residual
// by now, if it is F32.
func (e *engine) dense() uintptr {
	if e.target.dt == dtype.F32 {
		return e.target.ptr
	}
	e.allocate(&e.scratch, e.n*wordSize)
	return e.scratch.ptr
}

// The kernels, with sticky errors.

func (e *engine) fill(p uintptr, n int) {
	if e.err == nil && n > 0 {
		e.check(e.rt.Fill(p, n, dtype.F32, 0))
	}
}

func (e *engine) copy(dst, src uintptr, words int) {
	if e.err == nil && words > 0 && dst != src {
		e.check(e.rt.Copy(dst, src, words*wordSize))
	}
}

func (e *engine) accumulate(g gradient) {
	if e.err == nil {
		e.check(e.kernels.Accumulate(e.source(g)))
	}
}

// store writes the result to a gradient of another type than F32.
func (e *engine) store(dst uintptr, dt dtype.DType, src uintptr) {
	if e.err == nil && dst != src {
		e.check(e.kernels.Store(dst, dt, src, e.n, 1))
	}
}

func (e *engine) topK(src runtime.Source, k int, dst runtime.Entries, threshold uintptr) {
	if e.err == nil {
		e.check(e.kernels.TopK(src, k, dst, threshold))
	}
}

func (e *engine) topOf(l runtime.Entries, k int, dst runtime.Entries) {
	if e.err == nil {
		e.check(e.kernels.TopOf(l, k, dst))
	}
}

func (e *engine) aboveOf(l runtime.Entries, threshold uintptr, dst runtime.Entries) {
	if e.err == nil {
		e.check(e.kernels.AboveOf(l, threshold, dst))
	}
}

func (e *engine) merge(dst uintptr, dt dtype.DType, lists []runtime.Entries, scale float32) {
	if e.err == nil {
		e.check(e.kernels.Merge(dst, dt, e.n, lists, scale, e.at(numFaults)))
	}
}

func (e *engine) union(dst runtime.Entries, lists []runtime.Entries, scale float32) {
	if e.err == nil {
		e.check(e.kernels.Union(dst, e.n, lists, scale, e.at(numFaults)))
	}
}

// giveBack adds the entries of l to the residual, except those whose index is
// in taken.
func (e *engine) giveBack(l, taken runtime.Entries) {
	if e.err == nil && !e.cfg.NoErrorFeedback {
		e.check(e.kernels.GiveBack(e.array(e.residual), l, taken))
	}
}

// Communication, with sticky errors.

// fence makes communication wait for the kernels submitted so far.
func (e *engine) fence(ctx context.Context) {
	if e.err == nil {
		e.check(e.order.commAfterCompute(ctx))
	}
}

// join makes kernels wait for the communication submitted so far.
func (e *engine) join(ctx context.Context) {
	if e.err == nil {
		e.check(e.order.computeAfterComm(ctx))
	}
}

// add puts a call into the group that together starts.
func (e *engine) add(c comm.Call) { e.group = append(e.group, c) }

// together makes the calls that were added, at once, between what the device
// was given before and what it is given afterwards.
func (e *engine) together(ctx context.Context) {
	e.fence(ctx)
	switch {
	case e.err != nil:
	case len(e.group) == 1:
		e.check(e.group[0].Make(e.c))
	case len(e.group) > 1:
		e.check(e.c.Group(e.group...))
	}
	e.group = e.group[:0]
	e.join(ctx)
}

// communicate is together for one call.
func (e *engine) communicate(ctx context.Context, c comm.Call) {
	e.add(c)
	e.together(ctx)
}

package ddp

import (
	"cmp"
	"context"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Reducer reduces the gradients of a bucket as a program wants it: another compression, or
// another algorithm. Overlap, accumulation, Join, clipping, the verdict on non-finite
// gradients and Rebind are those of other buckets, and so is the transaction of a step: each Reduce is
// followed by one Commit or RollBack.
type Reducer interface {
	// Reduce replaces b.Tensor, which holds this rank's gradients, by (an approximation of) their
	// average over the ranks, with the same bits on each: by work that is submitted to the
	// tensor's runtime, and by collectives of b.Comm between such work, which all ranks make in
	// the same order. Package distributed has them with that order. It may run on another
	// goroutine than Ready.
	Reduce(ctx context.Context, b Bucket) error
	// Commit keeps what Reduce has changed, such as a residual, for the steps to come.
	Commit() error
	// RollBack makes it what it was before Reduce, also after an error of that.
	RollBack() error
	// State returns what a Reducer of the same bucket needs to go on from here, on the host.
	State(ctx context.Context) ([]byte, error)
	// Restore makes of it what it was, or of the states of [sparse.RestoreRanks] where the world
	// was another one.
	Restore(ctx context.Context, states ...[]byte) error
	// Rebind moves it to another communicator, which the next Reduce has.
	Rebind(c comm.Communicator) error
	// Close gives its memory back.
	Close() error
}

// Bucket is a bucket of gradients that a [Reducer] reduces.
type Bucket struct {
	Index  int
	Tensor *runtime.Tensor   // all its elements, one part after the other
	Comm   comm.Communicator // of the ranks that average
	Parts  []Part
}

// Part is a gradient in a bucket.
type Part struct {
	Param  int   // its number
	Shape  []int // of the parameter
	Offset int   // of its first element
}

// custom is a bucket that a Reducer reduces, in memory beside that of its gradients.
type custom struct {
	Reducer
	g      *transaction
	b      Bucket
	n      int
	dt     dtype.DType
	target uintptr // of the step

	memory  base.Buffer // the tensor's, and behind it what follows
	squares [2]uintptr  // F64: of the gradients of all ranks, and of the result
	limit   uintptr     // F32: what is as large is not finite
	flags   uintptr     // I32 of each rank, of the transaction
	begun   bool        // Reduce was called, and neither Commit nor RollBack
}

// newCustom makes what the program reduces a bucket with, nil for none.
func (g *Gradients) newCustom(i int, b *bucket) (reducer, error) {
	c := &custom{g: g.transaction, n: b.len(), dt: b.dt, b: Bucket{Index: i, Comm: g.meter}}
	bytes := (c.n*c.dt.Size() + 7) &^ 7
	if err := c.g.buffers.Allocate(c.g.rt, &c.memory, bytes+5*base.WordSize); err != nil {
		return nil, err
	}
	first := c.memory.Ptr + uintptr(bytes)
	c.squares = [2]uintptr{first, base.At(first, 2)}
	c.limit = base.At(first, 4)
	var err error
	if c.b.Tensor, err = runtime.Wrap(c.g.rt, c.memory.Ptr, c.dt, []int{c.n}, nil, nil); err != nil {
		return nil, err
	}
	offset := 0
	for _, p := range b.params {
		c.b.Parts = append(c.b.Parts, Part{p, g.shapes[p], offset})
		offset += g.lens[p]
	}
	if c.Reducer, err = g.cfg.Reducer(c.b); c.Reducer == nil || err != nil {
		return nil, err
	}
	return c, nil
}

// Drain implements reducer.
func (c *custom) Drain(context.Context) error { return nil }

// Select implements reducer.
func (c *custom) Select(_ context.Context, in sparse.Input) error {
	c.target = in.Ptr
	if err := c.g.rt.Copy(c.memory.Ptr, in.Ptr, c.n*c.dt.Size()); err != nil || in.Factor == 0 {
		return err
	}
	return c.g.kernels.Scale(c.memory.Ptr, c.dt, c.n, in.Factor)
}

// Exchange implements reducer.
func (c *custom) Exchange(ctx context.Context) error {
	c.begun = true
	if !c.judges() {
		return c.Reduce(ctx, c.b)
	}
	// What is not finite may wait in a residual, and all ranks are to know of it.
	o := &c.g.order
	err := c.g.kernels.SumSquares(c.memory.Ptr, c.dt, c.n, c.squares[0])
	if err == nil {
		err = c.Reduce(ctx, c.b)
	}
	if err == nil {
		err = o.CommAfterCompute(ctx)
	}
	if err == nil {
		err = c.b.Comm.AllReduce(c.squares[0], c.squares[0], 1, dtype.F64, comm.Sum)
	}
	if err == nil {
		err = o.ComputeAfterComm(ctx)
	}
	return err
}

// judges reports whether entries that are not finite are looked for.
func (c *custom) judges() bool { return c.g.cfg.NonFinite != sparse.PassNonFinite && c.n > 0 }

// InFlight implements reducer. The result is in memory that no other bucket uses.
func (c *custom) InFlight() bool { return true }

// Complete implements reducer. The device cannot roll a Reducer back, so the host waits for the
// verdict.
func (c *custom) Complete(context.Context) (hostWaited bool, err error) {
	if !c.judges() {
		return true, nil
	}
	// A sum of squares is not finite if an element is not, and then the high word of the F64 is, as
	// an F32, a NaN.
	err = c.g.rt.Fill(c.limit, 1, dtype.F32, math.MaxFloat32)
	if err == nil {
		err = c.g.kernels.SumSquares(c.memory.Ptr, c.dt, c.n, c.squares[1])
	}
	for i, p := range c.squares[:min(2, c.b.Comm.WorldSize())] { // there is a flag of each rank
		if err == nil {
			err = c.g.kernels.CountAbove(runtime.Entries{Idx: p, Val: base.At(p, 1), N: 1}, c.limit, 1, base.At(c.flags, i))
		}
	}
	return true, err
}

// Commit implements reducer.
func (c *custom) Commit(v sparse.Verdict) error {
	c.begun = false
	if v == sparse.Skips {
		return cmp.Or(c.Reducer.RollBack(), c.g.rt.Fill(c.target, c.n, c.dt, 0))
	}
	return cmp.Or(c.g.rt.Copy(c.target, c.memory.Ptr, c.n*c.dt.Size()), c.Reducer.Commit())
}

// RollBack implements reducer.
func (c *custom) RollBack() error {
	if !c.begun {
		return nil
	}
	c.begun = false
	return c.Reducer.RollBack()
}

// JoinTransaction implements reducer.
func (c *custom) JoinTransaction(flags, _ uintptr) { c.flags = flags }

// Terms implements reducer.
func (c *custom) Terms() string { return fmt.Sprintf("reduced by %T", c.Reducer) }

// Stats implements reducer.
func (c *custom) Stats(context.Context) (sparse.Stats, error) {
	return sparse.Stats{Elements: c.n}, nil
}

// PrepareRestore implements reducer.
func (c *custom) PrepareRestore(_ context.Context, states ...[]byte) (restore func(context.Context) error, err error) {
	return func(ctx context.Context) error { return c.Restore(ctx, states...) }, nil
}

// ScaleResidual implements reducer.
func (c *custom) ScaleResidual(float64) error {
	return fmt.Errorf("%w: the residual is that of %T", comm.ErrUnsupported, c.Reducer)
}

// Rebind implements reducer.
func (c *custom) Rebind(to comm.Communicator) error {
	c.b.Comm = to
	return c.Reducer.Rebind(to)
}

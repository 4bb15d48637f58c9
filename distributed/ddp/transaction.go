package ddp

import (
	"context"
	"errors"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// transaction is what the buckets of a [Gradients] share: the norm that clips them, a verdict on
// non-finite gradients, and memory.
type transaction struct {
	plain   bool              // all buckets are plain allreduces, of which none clips or judges
	rt      runtime.Runtime   // that works on buckets
	kernels kernel.Kernels    // of rt
	c       comm.Communicator // among whose ranks a step is agreed
	order   base.Order        // has c's work and the compute stream wait for each other
	cfg     engine.Settings   // of sparse buckets, and what clips and judges all of them
	buffers base.Buffers      // those below that hold memory
	shared  base.Buffer       // the gradients of one sparse bucket at a time
	sums    []fixedpoint.Sum  // of all buckets, where reproducible ones are summed at once

	memory  base.Buffer    // of what follows, all of it words
	squares uintptr        // squared norms, an F64 of each gradient
	flags   uintptr        // P of each bucket, and one of the norm
	factor  uintptr        // F32: what clips and weighs gradients
	summand uintptr        // F32: factor divided by the number of ranks, with weights
	norms   []float64      // squares on the host, with weights
	minimum uintptr        // I32 1, the least count of a flag
	limit   uintptr        // F32: a square whose high word is as large is not finite
	highs   uintptr        // the high words of the squares
	layout  [3][1]int      // of the copy to highs: strides there and here, and count
	skip    uintptr        // I32: how many flags are set
	skipped [1]int32       // skip on the host
	noted   uintptr        // I32: not 0 if the device has skipped a step since takeNote
	note    [1]kernel.Copy // of the copy to noted, reused
}

// newTransaction configures what buckets share; without kernels they are plain.
func newTransaction(g *Gradients, kernels kernel.Kernels, cfg engine.Settings) (*transaction, error) {
	t := &transaction{
		plain:   kernels == nil,
		rt:      g.runtime(),
		kernels: kernels,
		cfg:     cfg,
	}
	if t.plain { // on the compute stream alone
		t.rt = g.rt
	}
	if err := t.bind(g); err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

// bind gives the transaction g's communicator, and allocates what there is per gradient
// and per bucket.
func (t *transaction) bind(g *Gradients) error {
	t.c = g.meter
	t.order = base.NewOrder(t.rt, g.meter)
	if t.plain {
		return t.buffers.Release(t.rt, 0) // of a comparison that failed
	}
	squares := 2 * len(g.gradients)
	flags := t.c.WorldSize()*len(g.buckets) + 1
	words := squares + flags + 6 + len(g.gradients)
	if err := t.buffers.Allocate(t.rt, &t.memory, words*base.WordSize); err != nil {
		return err
	}
	t.squares = t.memory.Ptr
	t.flags = base.At(t.squares, squares)
	t.factor = base.At(t.flags, flags)
	t.minimum = base.At(t.factor, 1)
	t.skip = base.At(t.factor, 2)
	t.limit = base.At(t.factor, 3)
	t.highs = base.At(t.factor, 4)
	t.summand = base.At(t.highs, len(g.gradients))
	t.noted = base.At(t.summand, 1)
	if err := t.rt.Fill(t.noted, 1, dtype.I32, 0); err != nil {
		return err
	}
	if err := t.rt.Fill(t.flags, flags, dtype.I32, 0); err != nil { // of those that look for none
		return err
	}
	if err := t.rt.Fill(t.limit, 1, dtype.F32, math.MaxFloat32); err != nil {
		return err
	}
	return t.rt.Fill(t.minimum, 1, dtype.I32, 1)
}

// rollsBack reports whether a step that fails is rolled back.
func (t *transaction) rollsBack() bool {
	return !t.plain && !t.cfg.NoUndo
}

// judge looks at the non-finite entries that all buckets have counted. waited: the host has
// waited for the device in this step.
func (t *transaction) judge(ctx context.Context, buckets int, waited bool) (engine.Verdict, error) {
	if t.cfg.NonFinite == engine.PassNonFinite || buckets == 0 {
		return engine.Passes, nil
	}
	// As numbers, counts have the order of their bits.
	counts := kernel.Entries{Val: t.flags, N: buckets*t.c.WorldSize() + 1}
	if err := t.kernels.CountAbove(counts, t.minimum, 1, t.skip); err != nil {
		return engine.Passes, err
	}
	if t.cfg.NonFinite == engine.SkipNonFinite && t.order.Streams != nil && !waited {
		return engine.Deferred, t.noteSkip()
	}
	skips, err := t.skips(ctx)
	switch {
	case err != nil || !skips:
		return engine.Passes, err
	case t.cfg.NonFinite == engine.FailNonFinite:
		return engine.Skips, engine.ErrNonFinite
	}
	return engine.Skips, nil
}

// skips has the host wait for the last verdict, and returns whether it was to skip the step.
func (t *transaction) skips(ctx context.Context) (bool, error) {
	if err := t.order.HostAfterAll(ctx); err != nil {
		return false, err
	}
	err := t.rt.CopyOut(hostmem.Bytes(t.skipped[:]), t.skip)
	return t.skipped[0] != 0, err
}

// close gives the memory back, if the communicator is done with it.
func (t *transaction) close() error {
	if err := t.order.DrainToFree(); err != nil {
		return err
	}
	return t.buffers.Release(t.rt, 0)
}

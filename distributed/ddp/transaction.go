package ddp

import (
	"context"
	"errors"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// transaction is what the buckets of a [Gradients] share: the norm that clips them, a verdict on
// non-finite gradients, and memory.
type transaction struct {
	plain   bool            // all buckets are plain allreduces, of which none clips or judges
	rt      runtime.Runtime // that works on buckets
	kernels kernel.Kernels
	c       comm.Communicator
	order   base.Order
	cfg     engine.Settings
	buffers base.Buffers
	shared  base.Buffer // the gradients of one sparse bucket at a time

	memory  base.Buffer // of what follows, all of it words
	squares uintptr     // squared norms, an F64 of each gradient
	flags   uintptr     // P of each bucket, and one of the norm
	factor  uintptr     // F32: what clips and weighs gradients
	summand uintptr     // F32: factor divided by the number of ranks, with weights
	norms   []float64   // squares on the host, with weights
	least   uintptr     // I32 1, the least count of a flag
	limit   uintptr     // F32: a square whose high word is as large is not finite
	highs   uintptr     // the high words of the squares
	layout  [3][1]int
	skip    uintptr // I32: how many flags are set
	skipped [1]int32
}

// newTransaction configures what buckets share; without kernels they are plain.
func newTransaction(g *Gradients, kernels kernel.Kernels, cfg engine.Settings) (*transaction, error) {
	j := &transaction{plain: kernels == nil, rt: g.runtime(), kernels: kernels, cfg: cfg}
	if j.plain { // on the compute stream alone
		j.rt = g.rt
	}
	if err := j.bind(g); err != nil {
		return nil, errors.Join(err, j.close())
	}
	return j, nil
}

// bind makes g's communicator that of the transaction, and allocates what there is per gradient
// and per bucket.
func (j *transaction) bind(g *Gradients) error {
	j.c, j.order = g.meter, base.NewOrder(j.rt, g.meter)
	if j.plain {
		return j.buffers.Release(j.rt, 0) // of a comparison that failed
	}
	squares, flags := 2*len(g.gradients), j.c.WorldSize()*len(g.buckets)+1
	words := squares + flags + 5 + len(g.gradients)
	if err := j.buffers.Allocate(j.rt, &j.memory, words*base.WordSize); err != nil {
		return err
	}
	j.squares = j.memory.Ptr
	j.flags = base.At(j.squares, squares)
	j.factor = base.At(j.flags, flags)
	j.least, j.skip, j.limit, j.highs = base.At(j.factor, 1), base.At(j.factor, 2), base.At(j.factor, 3), base.At(j.factor, 4)
	j.summand = base.At(j.highs, len(g.gradients))
	if err := j.rt.Fill(j.flags, flags, dtype.I32, 0); err != nil { // of those that look for none
		return err
	}
	if err := j.rt.Fill(j.limit, 1, dtype.F32, math.MaxFloat32); err != nil {
		return err
	}
	return j.rt.Fill(j.least, 1, dtype.I32, 1)
}

// rollsBack reports whether a step that fails is rolled back.
func (j *transaction) rollsBack() bool { return !j.plain && !j.cfg.NoUndo }

// judge looks at the non-finite entries that all buckets have counted. waited: the host has
// waited for the device in this step.
func (j *transaction) judge(ctx context.Context, buckets int, waited bool) (engine.Verdict, error) {
	if j.cfg.NonFinite == engine.PassNonFinite || buckets == 0 {
		return engine.Passes, nil
	}
	// As numbers, counts have the order of their bits.
	counts := kernel.Entries{Val: j.flags, N: buckets*j.c.WorldSize() + 1}
	if err := j.kernels.CountAbove(counts, j.least, 1, j.skip); err != nil {
		return engine.Passes, err
	}
	if j.cfg.NonFinite == engine.SkipNonFinite && j.order.Streams != nil && !waited {
		return engine.Deferred, nil
	}
	skips, err := j.skips(ctx)
	switch {
	case err != nil || !skips:
		return engine.Passes, err
	case j.cfg.NonFinite == engine.FailNonFinite:
		return engine.Skips, engine.ErrNonFinite
	}
	return engine.Skips, nil
}

// skips has the host wait for the last verdict, and returns whether it was to skip the step.
func (j *transaction) skips(ctx context.Context) (bool, error) {
	if err := j.order.HostAfterAll(ctx); err != nil {
		return false, err
	}
	err := j.rt.CopyOut(hostmem.Bytes(j.skipped[:]), j.skip)
	return j.skipped[0] != 0, err
}

// close gives the memory back, if the communicator is done with it.
func (j *transaction) close() error {
	if err := j.order.DrainToFree(); err != nil {
		return err
	}
	return j.buffers.Release(j.rt, 0)
}

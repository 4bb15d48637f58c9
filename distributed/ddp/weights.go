package ddp

import (
	"context"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Weigh sets the number of samples (or tokens) of the next gradients of this rank, with [Config].Weighted. Gradients
// are means over weight samples, and results are means over the samples of all ranks: the sum of weight · gradient,
// divided by the sum of the weights. Call it in each backward pass before the first Accumulate, Ready or ReduceAll,
// which otherwise returns [comm.ErrArgument]. It does not communicate. A negative or non-finite weight is
// [comm.ErrArgument].
//
// With several passes for one step, the weight of the rank is the sum over its passes: those in which
// [Gradients.Accumulate] was called, and the last one. Passes may have different numbers of samples.
//
// Gradients of weight 0 count as zeros, even if they are NaN, as a mean over no samples may be. With
// [Config].BucketViews they are overwritten. A rank without data calls Wait alone, or [Gradients.Join], and has weight
// 0. If all weights are 0, the step has zero gradients. If all weights are equal, and each rank made one pass, results
// have the bits of a step without weights.
//
// A step that is rolled back keeps its weights: the same calls of Ready, or of ReduceAll, repeat it. A call of Weigh
// abandons the step instead, and discards what was accumulated.
func (g *Gradients) Weigh(weight float64) error {
	const op = "gradient weight"
	if err := g.usable(op); err != nil {
		return err
	}
	w := &g.weights
	refuse := func(format string, args ...any) error {
		return base.OpError(op, fmt.Errorf("%w: %s", comm.ErrArgument, fmt.Sprintf(format, args...)))
	}
	switch {
	case !g.cfg.Weighted:
		return refuse("Config.Weighted is not set")
	case g.step.begun:
		return refuse("in the middle of a step, want before its first Ready")
	case !(weight >= 0) || math.IsInf(weight, 1):
		return refuse("weight is %v, want a finite number, not negative", weight)
	case g.cfg.Reproducible > 0 && (weight != math.Trunc(weight) || weight > maxFixedWeight):
		return refuse("weight is %v, want a whole number of at most %d with Reproducible: others have no exact sum",
			weight, maxFixedWeight)
	}
	next := *w
	switch w.phase {
	case accumulating:
		next.earlier += w.pass
	case kept:
		next.earlier = 0
		next.unit = 0
	}
	if math.IsInf(next.earlier+weight, 1) || next.unit > 0 && weight/next.unit > maxRatio {
		return refuse("weight is %v after passes of %v, want one of similar size", weight, next.earlier)
	}
	if w.phase == kept {
		g.forgetSums()
		g.forgetHeld()
	}
	next.pass = weight
	next.phase = weighed
	*w = next
	return nil
}

// maxRatio is how many times larger a weight may be than the first one of its step, so that F32 have their ratio.
const maxRatio = 1e30

// maxFixedWeight is what an F32 has all whole numbers up to.
const maxFixedWeight = 1 << 24

// weights is what the gradients of a rank stand for, with Config.Weighted.
type weights struct {
	phase   weightPhase // whether this rank has a weight for the current pass
	pass    float64     // of the current pass
	earlier float64     // of the passes before it, which were accumulated
	unit    float64     // what accumulated sums were divided by: the first weight above 0; 0: nothing was accumulated
}

// weightPhase is how far the weights of a step are.
type weightPhase uint8

const (
	unweighed    weightPhase = iota // Weigh was not called in this step
	weighed                         // it was, and nothing was accumulated since
	accumulating                    // something was accumulated with the weight of the pass
	kept                            // the step was rolled back: all stays until it is repeated, or Weigh is called
)

// total is the rank's weight in a step.
func (w *weights) total() float64 {
	return w.earlier + w.pass
}

// needWeight refuses gradients that stand for an unknown number of samples.
func (g *Gradients) needWeight() error {
	if g.cfg.Weighted && g.weights.phase == unweighed {
		return fmt.Errorf("%w: Config.Weighted is set, want a call of Weigh before the first gradient", comm.ErrArgument)
	}
	return nil
}

// forgetSums leaves out what was accumulated for a step that is not repeated.
func (g *Gradients) forgetSums() {
	for i := range g.gradients {
		s := &g.gradients[i].sum
		s.accumulated = false
		s.whole = false
	}
}

// countPass counts a contribution of the current pass, and returns the address of its factor in a sum; 0: it is 1.
func (g *Gradients) countPass() (factor uintptr, err error) {
	w := &g.weights
	if w.unit == 0 {
		w.unit = w.pass
	}
	if w.pass == w.unit {
		return 0, nil
	}
	p, err := g.roster.factor()
	if err != nil {
		return 0, err
	}
	return p, g.rt.Fill(p, 1, dtype.F32, w.pass/w.unit)
}

// roster is the exchange of a few numbers at the beginning of a step: who has data, and how much.
type roster struct {
	memory *runtime.Tensor // F64: this rank's entry, those of all ranks, and two F32; nil: not configured
	all    []float64       // the entries, on the host
}

// An entry has a weight, and whether the rank has data, or has called Join.
const (
	entryWeight = iota
	entryPresent
	entryLen
)

// newRoster allocates memory for the ranks of the communicator.
func (g *Gradients) newRoster() error {
	if !g.cfg.Uneven && !g.cfg.Weighted {
		return nil
	}
	ranks := g.meter.WorldSize()
	if g.roster.memory != nil {
		if err := g.roster.memory.Free(); err != nil {
			return err
		}
	}
	memory, err := runtime.New(g.rt, dtype.F64, entryLen*(1+ranks)+1)
	g.roster = roster{memory: memory, all: make([]float64, entryLen*ranks)}
	return err
}

// factor returns the address of an F32 that multiplies gradients, and shareFactor another one.
func (r *roster) factor() (uintptr, error) {
	p, err := r.memory.Ptr()
	return p + uintptr(r.memory.Bytes()-2*base.WordSize), err
}

func (r *roster) shareFactor() (uintptr, error) {
	p, err := r.factor()
	return base.At(p, 1), err
}

// announce tells the others of this rank's weight in the step, and whether it has data. Nobody waits for it here.
func (g *Gradients) announce(ctx context.Context, present float64) error {
	if g.roster.memory == nil {
		return nil
	}
	g.step.weight = g.weights.total()
	p, err := g.roster.memory.Ptr()
	if err != nil {
		return err
	}
	entry := [entryLen]float64{entryWeight: g.step.weight, entryPresent: present}
	size := uintptr(dtype.F64.Size())
	for i, x := range entry {
		if err := g.rt.Fill(p+uintptr(i)*size, 1, dtype.F64, x); err != nil {
			return err
		}
	}
	if err := g.order.CommAfterCompute(ctx); err != nil {
		return err
	}
	return g.meter.AllGather(p, p+entryLen*size, entryLen, dtype.F64)
}

// readRoster has the host wait for what all ranks have announced, and copies it.
func (g *Gradients) readRoster(ctx context.Context) error {
	if err := g.order.ComputeAfterComm(ctx); err != nil {
		return err
	}
	if err := g.order.HostAfterAll(ctx); err != nil {
		return err
	}
	p, err := g.roster.memory.Ptr()
	if err != nil {
		return err
	}
	return g.rt.CopyOut(hostmem.Bytes(g.roster.all), p+uintptr(entryLen*dtype.F64.Size()))
}

// share finds this rank's share of the step, before the first bucket is reduced, and what scales its gradients by it.
func (g *Gradients) share(ctx context.Context) error {
	if !g.cfg.Weighted || g.step.shares != unknownShares {
		return nil
	}
	if err := g.readRoster(ctx); err != nil {
		return err
	}
	largest := 0.0
	equal := true
	total := 0.0
	for i := entryWeight; i < len(g.roster.all); i += entryLen {
		weight := g.roster.all[i]
		if !(weight >= 0) || math.IsInf(weight, 1) {
			return fmt.Errorf("%w: rank %d has announced the weight %v", comm.ErrMismatch, i/entryLen, weight)
		}
		largest = max(largest, weight)
		equal = equal && weight == g.roster.all[entryWeight]
		total += weight
	}
	g.step.total = total
	if equal || g.cfg.Reproducible > 0 { // of which each contribution is multiplied by its own weight
		g.step.shares = equalShares
		return nil
	}
	sum := 0.0
	for i := entryWeight; i < len(g.roster.all); i += entryLen {
		sum += g.roster.all[i] / largest // the sum of weights may be too large
	}
	g.step.shares = unequalShares
	g.step.share = g.step.weight / largest / sum
	return g.setShare()
}

// shares is what is known of the ranks' weights in a step.
type shares uint8

const (
	unknownShares shares = iota
	equalShares          // gradients are averaged as they are
	unequalShares        // each rank's gradients are scaled by its share
)

// empty reports whether this rank's gradients count as zeros.
func (g *Gradients) empty() bool {
	return g.cfg.Weighted && g.step.weight == 0
}

// setShare stores what scales gradients where the kernels read it.
func (g *Gradients) setShare() error {
	if g.transaction.plain {
		p, err := g.roster.shareFactor()
		if err != nil {
			return err
		}
		g.step.factor = p
		return g.rt.Fill(p, 1, dtype.F32, g.step.share)
	}
	t := g.transaction
	g.step.factor = t.factor
	g.step.summand = t.summand
	ranks := float64(t.c.WorldSize())
	if err := t.rt.Fill(t.factor, 1, dtype.F32, ranks*g.step.share); err != nil {
		return err
	}
	return t.rt.Fill(t.summand, 1, dtype.F32, g.step.share)
}

// reduction is the operation of plain buckets: gradients that were scaled by shares are added up.
func (g *Gradients) reduction() comm.ReduceOp {
	if g.step.shares == unequalShares {
		return comm.Sum
	}
	return g.op
}

// scalePlain scales the gradients of a plain bucket, which are put together, or are reduced where they are.
func (g *Gradients) scalePlain(b *bucket) error {
	if b.flat != nil && b.wire == b.dt { // otherwise they are scaled when they are rounded
		if err := g.scale(b.flat); err != nil {
			return err
		}
	}
	for _, i := range b.separate {
		if err := g.scale(g.step.tensors[i]); err != nil {
			return fmt.Errorf("gradient %d: %w", i, err)
		}
	}
	return nil
}

// scale multiplies a tensor by this rank's share.
func (g *Gradients) scale(t *runtime.Tensor) error {
	if g.empty() {
		return t.Fill(0)
	}
	if g.step.shares != unequalShares || t.Len() == 0 {
		return nil
	}
	kernels, err := kernel.Lookup(g.rt)
	if err != nil {
		return err
	}
	p, err := t.Ptr()
	if err != nil {
		return err
	}
	return kernels.Scale(p, t.DType(), t.Len(), g.step.factor)
}

// standIn makes zeros the gradient of a bucket that counts as the rank's own, and may have to be as before.
func (g *Gradients) standIn(b *bucket) (err error) {
	if g.empty() && b.flat == nil && !g.transaction.plain && g.cfg.Reproducible == 0 {
		b.step.zeros, err = g.spare(b.params[0])
	}
	return err
}

// weightedClip has gradients multiplied by what clips them as well as by this rank's share.
func (g *Gradients) weightedClip(clip uintptr) error {
	t := g.transaction
	if clip == 0 || g.step.shares != unequalShares {
		g.step.factor = clip
		return nil
	}
	if err := t.kernels.Scale(t.summand, dtype.F32, 1, clip); err != nil {
		return err
	}
	return t.kernels.Store(t.factor, dtype.F32, t.summand, 1, float32(t.c.WorldSize()), 0)
}

// keepWeights keeps the weights of a step that is rolled back, for its repetition: gradients that were ready, and have
// what was accumulated, stand for all passes then.
func (g *Gradients) keepWeights() {
	if !g.cfg.Weighted || g.weights.phase == unweighed {
		return
	}
	g.weights.phase = kept
	for i := range g.gradients {
		if g.step.folded[i] && !g.step.absent[i] {
			g.gradients[i].sum.whole = true
		}
	}
}

// endWeights ends the weights of a step.
func (g *Gradients) endWeights() {
	if !g.cfg.Weighted {
		return
	}
	g.weights = weights{}
	for i := range g.gradients {
		g.gradients[i].sum.whole = false
	}
}

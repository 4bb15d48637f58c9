package ddp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/internal/caller"
	"github.com/tutti-go/tutti/internal/stages"
	"github.com/tutti-go/tutti/runtime"
)

// Ready declares that t, this step's gradient i, is complete, or that the work that completes it has been submitted to
// the runtime's compute stream. Do not write or free t before Wait returns, which leaves the average in it. Another
// step may pass another tensor.
//
// Ready returns an error and changes nothing if i is out of range, the gradient is already ready, or t does not match
// the registered tensor or shares memory with another one of the step. A communication error persists: later calls
// return it too, until Wait ends the step if that is a transaction.
func (g *Gradients) Ready(ctx context.Context, i int, t *runtime.Tensor) error {
	const op = "gradient ready"
	if err := g.usable(op); err != nil {
		return err
	}
	if err := g.check(op, i, t); err != nil {
		return err
	}
	if err := g.needWeight(); err != nil {
		return base.OpError(op, err)
	}
	if err := g.place(i, t); err != nil {
		return base.OpError(op, err)
	}
	started := time.Now()
	g.accept(ctx, i, t)
	g.step.launch += time.Since(started)
	return base.OpError(op, errors.Join(g.err, g.step.fault))
}

// check checks this step's gradient i.
func (g *Gradients) check(op string, i int, t *runtime.Tensor) error {
	if i < 0 || i >= len(g.step.tensors) {
		return base.OpError(op, fmt.Errorf("%w: gradient %d is not in [0, %d)", comm.ErrArgument, i, len(g.step.tensors)))
	}
	if g.step.tensors[i] != nil {
		return base.OpError(op, fmt.Errorf("%w: gradient %d is ready already in this step", comm.ErrArgument, i))
	}
	if err := g.reachable(t); err != nil {
		return base.OpError(op, gradientError(i, err))
	}
	if dt := g.buckets[g.bucketOf[i]].dt; t.DType() != dt {
		return base.OpError(op, fmt.Errorf("%w: gradient %d is %v, registered was %v", runtime.ErrDType, i, t.DType(), dt))
	}
	if t.Len() != g.gradients[i].n {
		return base.ShapeError(op, "gradient %d has %d elements, registered were %d", i, t.Len(), g.gradients[i].n)
	}
	return nil
}

// place notes where this step's gradient i is, and refuses memory of another one of the step, also of its view.
func (g *Gradients) place(i int, t *runtime.Tensor) error {
	if g.views != nil {
		if err := g.outsideBuckets(i, t); err != nil {
			return err
		}
	}
	overlap, err := g.spans.Place(i, t)
	if err != nil {
		return err
	}
	if overlap >= 0 {
		return gradientError(i, base.OverlapError("gradient", overlap, i))
	}
	return nil
}

// outsideBuckets refuses memory of the gradients' views for a gradient i that is not the view itself.
func (g *Gradients) outsideBuckets(i int, t *runtime.Tensor) error {
	from, err := t.Ptr()
	if err != nil {
		return err
	}
	if view, err := g.views[i].Ptr(); err != nil || view == from {
		return err
	}
	for _, b := range g.buckets {
		first, err := b.flat.Ptr()
		if err != nil {
			return err
		}
		if from < first+uintptr(b.bytes) && first < from+uintptr(t.Bytes()) {
			return fmt.Errorf("%w: gradient %d is in memory of the Views, and not its own one", comm.ErrArgument, i)
		}
	}
	return nil
}

// checkAll checks the gradients of a step that has not begun, of which one that is nil is left out.
func (g *Gradients) checkAll(op string, gradients []*runtime.Tensor) error {
	for i, t := range gradients {
		if t == nil {
			continue
		}
		if err := g.check(op, i, t); err != nil {
			return err
		}
	}
	for i, t := range gradients {
		if t == nil {
			continue
		}
		if err := g.place(i, t); err != nil {
			g.placeGiven()
			return base.OpError(op, err)
		}
	}
	return nil
}

// placeGiven leaves no other gradients placed than those that are ready.
func (g *Gradients) placeGiven() {
	g.spans.NextStep()
	for i, t := range g.step.tensors {
		if t != nil {
			_, _ = g.spans.Place(i, t) // it was placed before
		}
	}
}

// begin begins a step, if it has not begun.
func (g *Gradients) begin(ctx context.Context) {
	if !g.step.begun && g.sound() {
		g.step.begun = true
		g.step.started = time.Now()
		g.step.observe = stages.From(ctx)
		if err := g.drain(ctx); err != nil {
			g.fail(err)
			return
		}
		g.fail(g.announce(ctx, 1))
	}
}

// drain waits for what a failed step left in flight, and then has the ranks compare what they reduce, if they
// have not yet. It comes before anything that buckets share is written, and before anything else is communicated.
func (g *Gradients) drain(ctx context.Context) error {
	if err := g.awaitStep(ctx); err != nil {
		return err
	}
	return g.agree(ctx)
}

// awaitStep waits for what a step that failed has left in flight.
func (g *Gradients) awaitStep(ctx context.Context) error {
	if err := g.order.Drain(ctx); err != nil {
		return err
	}
	if err := g.transaction.order.Drain(ctx); err != nil {
		return err
	}
	for _, b := range g.buckets {
		if err := b.reducer.Drain(ctx); err != nil {
			return err
		}
	}
	return nil
}

// fail notes an error, if it is one. Where a step is a transaction, Wait rolls it back.
func (g *Gradients) fail(err error) {
	if err == nil {
		return
	}
	if g.transaction.rollsBack() {
		g.step.fault = err
		return
	}
	g.err = err
}

// sound reports whether nothing has failed in the step.
func (g *Gradients) sound() bool { return g.step.fault == nil && g.err == nil }

// accept takes a gradient and reduces the buckets that it completes.
func (g *Gradients) accept(ctx context.Context, i int, t *runtime.Tensor) {
	g.begin(ctx)
	if g.sound() {
		g.fail(g.fold(i, t))
	}
	g.step.tensors[i] = t
	g.buckets[g.bucketOf[i]].step.missing--
	if !g.clipsFirst() {
		g.launchComplete(ctx)
	}
}

// clipsFirst reports whether gradients are clipped before they are reduced, and not the results.
func (g *Gradients) clipsFirst() bool {
	return g.transaction.cfg.ClipNorm > 0 && g.cfg.Reproducible == 0
}

// launchComplete reduces the buckets whose turn it is and which are complete.
func (g *Gradients) launchComplete(ctx context.Context) {
	if g.async != nil && g.step.fault == nil {
		g.step.fault = g.async.look()
	}
	for g.step.next < len(g.buckets) && g.buckets[g.step.next].step.missing == 0 && g.sound() {
		if err := g.share(ctx); err != nil {
			g.fail(err)
			return
		}
		b := g.buckets[g.step.next]
		g.step.next++
		g.fail(g.start(ctx, b))
	}
}

// start starts the step of a bucket, and may also end it.
func (g *Gradients) start(ctx context.Context, b *bucket) error {
	if err := g.standIn(b); err != nil {
		return err
	}
	if err := g.side.mark(b.ready); err != nil {
		return err
	}
	if g.async != nil && g.side != nil { // it also submits the work, in the order of the side stream
		g.handOver(b)
		return nil
	}
	if err := g.selectEntries(ctx, b); err != nil {
		return err
	}
	if g.async != nil {
		g.handOver(b)
		return nil
	}
	err := b.reducer.Exchange(ctx)
	g.passed(b, stages.Exchanged)
	if err != nil {
		return err
	}
	if g.transaction.cfg.NoUndo && !b.reducer.InFlight() {
		// It will not be rolled back, and ends here: the result may be in memory that the next bucket uses.
		return g.commit(b, engine.Passes)
	}
	return nil
}

// handOver gives a bucket to the communication worker.
func (g *Gradients) handOver(b *bucket) {
	if _, ok := comm.As[caller.Recorder](g.meter); ok {
		b.asked.Take()
	}
	g.async.add(b)
}

// selectEntries selects from a bucket, whose gradients are there at its mark.
func (g *Gradients) selectEntries(ctx context.Context, b *bucket) error {
	t := b.flat
	if t == nil {
		t = b.step.zeros
	}
	if t == nil {
		t = g.step.tensors[b.params[0]]
	}
	if err := g.side.follow(b.ready); err != nil {
		return err
	}
	if err := g.gather(b); err != nil {
		return err
	}
	if g.transaction.plain {
		if err := g.scalePlain(b); err != nil {
			return err
		}
	}
	ptr, err := t.Ptr()
	if err != nil {
		return err
	}
	err = b.reducer.Select(ctx, engine.Input{
		Ptr:    ptr,
		DType:  b.dt,
		Factor: g.step.factor,
		Share:  g.step.summand,
		Lent:   g.order.Streams == nil && b.flat != nil && b.shares(),
	})
	g.passed(b, stages.Selected)
	return err
}

// exchange is what the worker does, until Wait's context ends it.
func (g *Gradients) exchange(b *bucket) error {
	ctx := context.Background()
	if recorder, ok := comm.As[caller.Recorder](g.meter); ok {
		recorder.Attribute(&b.asked)
		defer recorder.Attribute(nil)
	}
	if g.side != nil {
		if err := g.selectEntries(ctx, b); err != nil {
			return err
		}
	}
	started := time.Now()
	defer func() { b.step.took = time.Since(started) }()
	err := b.reducer.Exchange(ctx)
	g.passed(b, stages.Exchanged)
	if err != nil {
		return err
	}
	idle := len(g.async.queue) == 0 // nothing else is to be exchanged yet
	if g.order.Streams != nil || !idle {
		return nil
	}
	exchanged := slices.Index(g.buckets, b) + 1
	_, err = g.arrive(ctx, g.buckets[:exchanged])
	return err
}

// arrive completes the steps of buckets, as far as that was not done, and returns whether the host has
// waited for the device.
func (g *Gradients) arrive(ctx context.Context, buckets []*bucket) (waited bool, err error) {
	for _, b := range buckets {
		if b.step.result == pending {
			hostWaited, err := b.reducer.Complete(ctx)
			if err != nil {
				return waited, err
			}
			b.step.result = complete
			waited = waited || hostWaited
		}
	}
	return waited, nil
}

// commit ends the step of a bucket.
func (g *Gradients) commit(b *bucket, v engine.Verdict) error {
	err := g.writeResult(b, v)
	b.step.result = committed
	g.passed(b, stages.Finished)
	return err
}

// writeResult has the gradients of a bucket hold the result.
func (g *Gradients) writeResult(b *bucket, v engine.Verdict) error {
	if err := b.reducer.Commit(v); err != nil {
		return err
	}
	if b.step.zeros != nil {
		i := b.params[0]
		if err := g.copyOnStream(g.step.tensors[i], b.step.zeros); err != nil {
			return err
		}
	}
	if g.cfg.Shard {
		return nil
	}
	return g.copyParts(b, true)
}

// passed tells the observer of the step that the work of a stage of a bucket has been submitted.
func (g *Gradients) passed(b *bucket, s stages.Stage) {
	if g.step.observe != nil && !g.transaction.plain {
		g.step.observe(slices.Index(g.buckets, b), s, g.runtime().ComputeStream())
	}
}

// Wait completes the step: when it returns, all gradients are averages (for work submitted to the compute stream from
// then on), and the next step may begin. On a device with streams the host has not waited. Before it reads a gradient,
// or anything computed from one, it must call the communicator's Sync (see "Completion" in package distributed).
//
// A gradient that was left out, because this rank did not use the parameter, counts as zero, plus what was accumulated
// for it ([Gradients.Accumulate]). Other ranks may contribute, so the average may be non-zero. Read it from
// [Gradients.Result], so that all ranks make the same update.
//
// An error of a transactional step restores everything to the state before its first Ready, with which the next step
// begins.
func (g *Gradients) Wait(ctx context.Context) error {
	const op = "gradient wait"
	if err := g.usable(op); err != nil && (g.closed || g.err != nil) {
		return err
	}
	started := time.Now()
	g.begin(ctx)
	for i, t := range slices.Backward(g.step.tensors) {
		if t == nil && g.sound() {
			t, err := g.zero(i)
			if err != nil {
				g.fail(err)
				continue
			}
			g.accept(ctx, i, t)
		}
	}
	g.conclude(ctx)
	if g.step.fault != nil {
		return base.OpError(op, g.rollBack())
	}
	if g.err != nil {
		return base.OpError(op, g.err)
	}
	g.stats.Weight = g.step.total
	after := g.lines.outer.Totals()
	g.stats.Step = g.steps
	g.stats.Buckets = len(g.buckets)
	g.stats.Patterns = g.patterns
	g.stats.LaunchTime = g.step.launch
	g.stats.WaitTime = time.Since(started)
	g.stats.SentElements = after.SentElements - g.step.before.SentElements
	g.stats.SentBytes = after.SentBytes - g.step.before.SentBytes
	g.trace(started)
	results := g.step.tensors
	g.step.tensors = g.results
	g.results = results
	g.steps++
	g.endWeights()
	g.forgetHeld()
	g.newStep()
	if g.err != nil {
		return base.OpError(op, g.err)
	}
	if g.onStep != nil {
		g.onStep(g.stats)
	}
	return nil
}

// trace tells a timeline, where the communicator keeps one, of the step and of its Wait.
func (g *Gradients) trace(waiting time.Time) {
	if tracer, ok := comm.As[comm.Tracer](g.meter); ok {
		tracer.Span("gradients", g.step.started)
		tracer.Span("gradient wait", waiting)
	}
}

// conclude completes what was launched, and commits it.
func (g *Gradients) conclude(ctx context.Context) {
	if g.sound() {
		g.fail(g.share(ctx))
	}
	if g.sound() && g.clipsFirst() {
		g.fail(g.clip(ctx))
		g.launchComplete(ctx)
	}
	if g.async != nil { // also after an error: it reads gradients
		started := time.Now()
		if err := g.async.wait(ctx, g.lines.all); g.step.fault == nil {
			g.fail(err)
		}
		g.stats.ExchangeTime = 0
		for _, b := range g.buckets {
			g.stats.ExchangeTime += b.step.took
		}
		g.stats.HiddenTime = max(0, g.stats.ExchangeTime-time.Since(started))
	}
	if !g.sound() {
		g.fail(g.side.join())
		return
	}
	v, err := g.confirmed(ctx)
	if err != nil {
		g.fail(err)
		g.fail(g.side.join())
		return
	}
	// An error while results are written stays.
	g.err = g.commitAll(v)
	g.err = cmp.Or(g.err, g.lookForSkips(ctx))
	g.err = cmp.Or(g.err, g.side.join())
}

// confirmed completes the steps of all buckets, judges them, and has the other ranks know of the results.
func (g *Gradients) confirmed(ctx context.Context) (engine.Verdict, error) {
	v, err := g.complete(ctx)
	if err != nil {
		return v, err
	}
	if g.confirm != nil {
		return v, g.confirm(ctx)
	}
	return v, nil
}

// clip computes what scales the gradients, which are all there, before their buckets are launched.
func (g *Gradients) clip(ctx context.Context) error {
	if err := g.side.catchUp(); err != nil {
		return err
	}
	weight := 1.0
	if g.step.shares == unequalShares {
		weight = float64(g.meter.WorldSize()) * g.step.share
	}
	if g.empty() {
		weight = 0
	}
	factor, err := g.transaction.clip(ctx, g.step.tensors, len(g.buckets), weight)
	if err != nil {
		return err
	}
	return g.weightedClip(factor)
}

// complete completes the steps of all buckets, and judges them.
func (g *Gradients) complete(ctx context.Context) (engine.Verdict, error) {
	if g.cfg.Uneven {
		if err := g.order.ComputeAfterComm(ctx); err != nil {
			return engine.Passes, err
		}
	}
	waited, err := g.arrive(ctx, g.buckets)
	if err != nil {
		return engine.Passes, err
	}
	if g.cfg.Reproducible > 0 {
		if err := g.concludeFixed(ctx); err != nil {
			return engine.Passes, err
		}
		waited = true
	}
	if g.fixedAtOnce() {
		if err := g.sumAtOnce(ctx); err != nil {
			return engine.Passes, err
		}
	}
	order := &g.transaction.order
	if g.confirm != nil && order.Streams != nil { // it tells the others that this rank has the results
		for _, c := range g.lines.all {
			if err := c.Sync(ctx); err != nil {
				return engine.Passes, err
			}
		}
		if err := order.HostAfterCompute(ctx); err != nil {
			return engine.Passes, err
		}
		waited = true
	}
	v, err := g.transaction.judge(ctx, len(g.buckets), waited)
	switch {
	case errors.Is(err, engine.ErrNonFinite):
		err = g.nameNonFinite(ctx, err)
	case v == engine.Skips && !base.IsQuiet(ctx):
		g.reportSkip(ctx)
	}
	return v, err
}

// commitAll commits the steps of all buckets that have not ended.
func (g *Gradients) commitAll(v engine.Verdict) error {
	for _, b := range g.buckets {
		if b.step.result == committed {
			continue
		}
		if err := g.commit(b, v); err != nil {
			return err
		}
	}
	g.stats.Skipped = v == engine.Skips
	g.undecided = v == engine.Deferred
	return nil
}

// rollBack rolls back the steps of all buckets that were started, and returns why it did. An error from now on stays.
func (g *Gradients) rollBack() error {
	cause := g.step.fault
	for _, b := range g.buckets[:g.step.next] {
		if err := b.reducer.RollBack(); err != nil && g.err == nil {
			g.err = fmt.Errorf("%w; and residuals are lost, because they could not be restored: %w", cause, err)
		}
	}
	if g.err == nil {
		g.err = g.side.join()
	}
	g.unfold()
	g.newStep()
	if g.err != nil {
		return g.err
	}
	return fmt.Errorf("%w (the step was rolled back: gradients and residuals are as before)", cause)
}

// ReduceAll makes a whole step: Ready for all gradients except nil ones, and Wait. If a gradient is invalid or the
// context has ended, it returns an error before it accepts any gradient.
func (g *Gradients) ReduceAll(ctx context.Context, gradients []*runtime.Tensor) error {
	const op = "gradient reduce"
	if len(gradients) != len(g.step.tensors) {
		return base.OpError(op, fmt.Errorf("%w: %d gradients, registered were %d",
			comm.ErrArgument, len(gradients), len(g.step.tensors)))
	}
	if g.usable(op) == nil {
		if err := g.checkAll(op, gradients); err != nil {
			return err
		}
		given := slices.ContainsFunc(gradients, func(t *runtime.Tensor) bool { return t != nil })
		if err := g.needWeight(); given && err != nil {
			return base.OpError(op, err)
		}
		if !g.step.begun && ctx.Err() != nil {
			g.heldRolledBack = true
			return base.OpError(op, comm.ContextError(ctx))
		}
	}
	for i, t := range slices.Backward(gradients) {
		if t != nil {
			if err := g.Ready(ctx, i, t); err != nil {
				if g.step.fault != nil {
					return g.Wait(ctx) // it ends the step
				}
				return err
			}
		}
	}
	return g.Wait(ctx)
}

// newStep resets what belongs to one step.
func (g *Gradients) newStep() {
	s := &g.step
	clear(s.tensors)
	clear(s.absent)
	clear(s.folded)
	g.spans.NextStep()
	g.step = step{
		tensors: s.tensors,
		absent:  s.absent,
		folded:  s.folded,
		before:  g.lines.outer.Totals(),
	}
	for _, b := range g.buckets {
		b.step = bucketStep{missing: len(b.params)}
	}
}

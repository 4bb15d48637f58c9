package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/internal/stages"
	"github.com/tutti-go/tutti/runtime"
)

// AllReduce makes a step: it replaces t by the average of all ranks' t. After an error it has rolled the step back.
func (s *Reducer) AllReduce(ctx context.Context, t *runtime.Tensor) error {
	const op = "sparse allreduce"
	if err := s.ready(); err != nil {
		return base.OpError(op, err)
	}
	ptr, err := s.checkTensor(op, t)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return base.OpError(op, comm.ContextError(ctx))
	}
	g := Input{Ptr: ptr, DType: t.DType()}
	s.observe = stages.From(ctx)
	if s.Select(ctx, g) != nil || s.Exchange(ctx) != nil || s.end(ctx) != nil {
		return base.OpError(op, s.failed())
	}
	return nil
}

// end completes and commits a step.
func (s *Reducer) end(ctx context.Context) error {
	started := time.Now()
	defer func() { s.stats.ExchangeTime += time.Since(started) }()
	if _, err := s.Complete(ctx); err != nil {
		return err
	}
	if s.confirm != nil { // tells the other ranks that this one has the result
		s.do(func() error { return s.order.HostAfterAll(ctx) })
		s.hostWaited = true
	}
	v := s.judge(ctx)
	if s.confirm != nil {
		s.do(func() error { return s.confirm(ctx) })
	}
	if s.err != nil {
		return s.err
	}
	return s.Commit(v)
}

// Drain waits for communication that a failed step has left in flight, until ctx ends.
func (s *Reducer) Drain(ctx context.Context) error {
	return s.order.Drain(ctx)
}

// Select begins a step: it adds the gradient to the residual and selects the entries to send. A dense step also reads
// the gradient afterwards, unless it is lent. Select communicates only before the first step, to choose for [Auto],
// and to clip by the norm of all ranks. Call RollBack after an error. Select, like any method that requires a closed
// step, fails with [comm.ErrArgument] while a step is open.
func (s *Reducer) Select(ctx context.Context, g Input) error {
	if err := s.ready(); err != nil {
		return err
	}
	started := time.Now()
	sent := s.meter.Totals()
	s.step = step{
		phase: begun,
		last:  s.stats,
		stats: Stats{Step: s.steps, Elements: s.n},
	}
	if ctx.Err() != nil {
		s.check(comm.ContextError(ctx))
	} else {
		s.check(s.order.Drain(ctx)) // an earlier step may have failed
	}
	if !s.agreed {
		s.agree(ctx, s.terms(g.DType))
	}
	s.lookForFaults(ctx)
	if s.err != nil {
		return s.err
	}
	density, dense := s.cfg.density(s.steps)
	if !dense && s.cfg.Pattern == sparsity.Auto {
		s.decide(ctx, g.DType)
		if s.err != nil {
			return s.err
		}
		started = time.Now()
		sent = s.meter.Totals()
	}
	if s.choice != nil {
		s.stats.Chosen = s.choice.Pattern
	}
	// The dense pattern of a program ignores densities. If it was chosen, it pauses where other patterns would.
	dense = dense || s.cfg.Pattern == sparsity.Dense && !(s.cfg.chosen && density == 0)
	if dense && !s.coded() && !s.cfg.pauses() {
		s.takeWhole(ctx, g)
	} else {
		s.takeSome(ctx, g, density, dense)
	}
	s.stats.SelectTime = time.Since(started)
	s.addSent(sent)
	s.phase = selected
	return s.err
}

// Exchange computes the result from the entries that all ranks selected.
func (s *Reducer) Exchange(ctx context.Context) error {
	if err := s.in(selected, selected); err != nil {
		return err
	}
	started := time.Now()
	sent := s.meter.Totals()
	switch {
	case s.whole.DType != dtype.Invalid:
		s.communicate(ctx, s.whole)
		if s.judges() {
			s.fill(s.flags, s.size)
			s.countArray(s.whole.Recv, s.whole.DType)
		}
		s.result = result{dense: s.whole.Recv, scale: 1}
	case s.stats.K > 0:
		s.result = s.exchange.run(ctx, s.selected)
	}
	s.phase = exchanged
	s.stats.ExchangeTime = time.Since(started)
	s.addSent(sent)
	return s.err
}

// addSent adds the traffic since before to the step.
func (s *Reducer) addSent(before metered.Traffic) {
	now := s.meter.Totals()
	s.stats.SentElements += now.SentElements - before.SentElements
	s.stats.SentBytes += now.SentBytes - before.SentBytes
}

// BeforeCommit makes each AllReduce call f when this rank has the result, before it writes anything that cannot be
// rolled back. nil ends that.
func (s *Reducer) BeforeCommit(f func(ctx context.Context) error) {
	s.confirm = f
}

// passed notifies the observer of a step of AllReduce that the work of a stage has been submitted.
func (s *Reducer) passed(stage stages.Stage) {
	if s.observe != nil {
		s.observe(0, stage, s.rt.ComputeStream())
	}
}

// Commit ends a step whose exchange is complete: it writes the result to the gradient, or skips the step. An error
// stays, because the gradient may be lost.
func (s *Reducer) Commit(v Verdict) error {
	if err := s.in(exchanged, judged); err != nil {
		return err
	}
	g := s.gradient
	switch {
	case v == Skips:
		if !s.joined {
			s.reportSkip()
		}
		if s.restores != nothingSaved {
			s.rollBack()
		}
		if s.err == nil { // otherwise the gradient is unchanged
			s.check(s.rt.Fill(g.Ptr, s.n, g.DType, 0))
		}
		s.skipped()
	case s.result.dense == 0:
		s.merge(g.Ptr, g.DType, s.result.lists, s.result.scale, s.result.left)
	case s.stats.Dense && s.whole.DType == g.DType:
		s.copyBytes(g.Ptr, s.result.dense, s.n*g.DType.Size())
	default:
		s.store(g.Ptr, g.DType, s.result.dense)
	}
	if s.err == nil {
		s.phase = finished // later failures cannot be rolled back: the gradient is overwritten
	}
	if v != Skips && !s.stats.Dense {
		s.mask(s.selected)
	}
	s.deferred = v == Deferred
	if s.deferred {
		s.rollBackIfNonFinite(g)
	}
	if s.hostState.pending && s.judges() {
		s.post()
	}
	if s.err == nil {
		s.steps++
		if !g.Scratch {
			s.restores = nothingSaved
		}
	}
	s.passed(stages.Finished)
	return s.err
}

// RollBack ends a step that was begun and not committed, or whose gradient is scratch: the residual is restored, bit
// for bit, unless that fails with an error, which stays. Without such a step it does nothing.
func (s *Reducer) RollBack() error {
	done := s.phase == finished && s.gradient.Scratch
	if !s.phase.open() && !done {
		return s.err
	}
	s.err = nil
	if done {
		s.steps--
	}
	if s.restores != nothingSaved {
		s.rollBack()
	}
	if s.chose {
		s.become(sparsity.Auto, nil)
	}
	s.step = step{
		phase:   rolledBack,
		stats:   s.last,
		counted: true,
	}
	return s.err
}

// failed rolls back a failed step, if possible, and returns the cause. Later errors stay.
func (s *Reducer) failed() error {
	if s.cfg.NoUndo {
		s.stats = s.last
		s.counted = true
		return s.err
	}
	cause := s.err
	if !s.phase.open() {
		s.err = fmt.Errorf("%w; and the gradient is lost, because the result was written to its place before", cause)
		return s.err
	}
	if s.RollBack() != nil {
		s.err = fmt.Errorf("%w; and the residual is lost, because it could not be restored: %w", cause, s.err)
		return s.err
	}
	return fmt.Errorf("%w (the step was rolled back: gradient and residual are as before)", cause)
}

// takeWhole prepares to average the gradient itself. Residuals are not changed: dense steps come before sparse ones,
// so they are empty. A result that may be rolled back is computed in separate memory.
func (s *Reducer) takeWhole(ctx context.Context, g Input) {
	s.sendsAll()
	s.gradient = g
	if s.cfg.Momentum > 0 {
		s.takeVelocity(ctx, g)
		return
	}
	bytes := s.n * g.DType.Size()
	send := g.Ptr
	sum := g.Ptr
	if !s.cfg.NoUndo {
		sum = s.origin
		if sum == 0 {
			s.allocate(&s.flat, bytes)
			sum = s.flat.Ptr
		}
	}
	s.clip(ctx, &g)
	if g.Factor != 0 || g.Lent || s.flagsInput() {
		send = sum
		s.copyBytes(send, g.Ptr, bytes)
	}
	factor := g.Factor
	op := comm.Avg
	if g.Share != 0 && g.DType == dtype.F16 { // a factor above 1 may exceed its range
		factor = g.Share
		op = comm.Sum
	}
	if factor != 0 && s.err == nil {
		s.check(s.kernels.Scale(send, g.DType, s.n, factor))
	}
	s.flagInput(send, g.DType)
	s.whole = comm.AllReduceCall(send, sum, s.n, g.DType, op)
}

// takeVelocity prepares to average the velocity, in F32 whatever the gradient's type: it may exceed the range of that
// type, and the residual keeps the excess for the next step.
func (s *Reducer) takeVelocity(ctx context.Context, g Input) {
	s.clip(ctx, &g)
	s.save()
	s.accumulate(s.addMomentum(g))
	sum := s.denseResult()
	s.copy(sum, s.residual, s.n)
	s.fill(s.residual, s.n)
	s.flagInput(sum, dtype.F32)
	s.whole = comm.AllReduceCall(sum, sum, s.n, dtype.F32, comm.Avg)
}

// sendsAll records that the step is dense.
func (s *Reducer) sendsAll() {
	s.stats.Pattern = sparsity.Dense
	s.stats.Dense = true
	s.stats.K = s.n
	s.stats.SelectedLocal = s.n
	s.stats.SelectedGlobal = s.n
}

// takeSome adds the gradient to the residual and selects from it, or leaves the whole residual to the exchange.
func (s *Reducer) takeSome(ctx context.Context, g Input, density float64, whole bool) {
	k := count(density, s.n)
	if whole {
		k = s.n
	}
	s.plan(ctx, k, whole)
	s.stats.K = k
	if whole {
		s.sendsAll()
	}
	s.clip(ctx, &g)
	s.gradient = g
	s.save()
	if s.err != nil {
		return // nothing has changed, and nothing may
	}
	if s.cfg.NoErrorFeedback {
		s.fill(s.residual, s.n)
	}
	g = s.addMomentum(g)
	if k == 0 {
		s.accumulate(g)
		s.judgeAlone()
		return
	}
	s.stats.Pattern = s.name
	s.selected = s.selector.selectEntries(g, k, s.exchange.placeSelected(ctx, s.selector.capacity(k)))
	s.passed(stages.Selected)
}

// Complete makes the compute stream wait for the exchange, and counts entries of the result that are not finite.
// waited is true if the host has waited for the device in this step.
func (s *Reducer) Complete(ctx context.Context) (waited bool, err error) {
	if err := s.in(exchanged, exchanged); err != nil {
		return s.hostWaited, err
	}
	s.arriveAll(ctx, s.result)
	s.passed(stages.Exchanged)
	if s.flags != s.address(s.nonFiniteCounts) { // the verdict covers other tensors too
		s.finding = unknown
	}
	if s.judges() && s.stats.Pattern != "" && s.whole.DType == dtype.Invalid && !s.flagged {
		s.countResult(s.result)
	}
	s.phase = judged
	return s.hostWaited, s.err
}

// in returns an error unless the step's phase is in a range.
func (s *Reducer) in(from, to phase) error {
	if s.err == nil && (s.phase < from || s.phase > to) {
		return fmt.Errorf("%w: parts of a step are made in the order Select, Exchange, Complete, Commit", comm.ErrArgument)
	}
	return s.err
}

// InFlight reports whether the compute stream does not wait for the exchange yet.
func (s *Reducer) InFlight() bool { return s.inFlight }

// JoinTransaction makes s one of several tensors whose steps pass or are skipped together. Complete counts, at flags
// (an I32 for each rank), the entries of the result that are not finite. The device rolls back a step that is
// committed as [Deferred] if the I32 at skip is not 0. The caller compares the ranks' terms ([Reducer.Terms]), and
// logs what a [Reducer.Rebind] loses. A Rebind ends it.
func (s *Reducer) JoinTransaction(flags, skip uintptr) {
	s.flags = flags
	s.skip = skip
	s.skips = 1
	s.agreed = true
	s.joined = true
}

// faultInterval is the number of steps between waits for the device only to check the kernels' counts.
const faultInterval = 256

// lookForFaults fails this step if kernels of earlier steps have left out indices. A step whose exchange reads nothing
// would not notice. It costs a copy of the numbers; if the host has to wait for that, few steps do it.
func (s *Reducer) lookForFaults(ctx context.Context) {
	if s.order.Streams != nil && (s.steps == 0 || s.steps%faultInterval != 0 || s.rt.Stats().Frozen) {
		return
	}
	s.read(ctx)
	s.hostWaited = false // for this step
}

// Skipped reports whether the last step was rolled back because a number is not finite. It waits like [Reducer.Stats].
func (s *Reducer) Skipped(ctx context.Context) (bool, error) {
	stats, err := s.Stats(ctx)
	return stats.Skipped, err
}

// Stats returns the statistics of the last step. It waits for numbers on the device, until ctx ends.
func (s *Reducer) Stats(ctx context.Context) (Stats, error) {
	if s.counted || s.closed || s.err != nil {
		return s.stats, nil
	}
	idle := s.stats.Dense || s.selected.Idx == 0 // what there is to count, is
	if idle && !s.deferred {
		return s.stats, nil
	}
	found := s.foundNonFinite(ctx)
	s.readPosted(ctx)
	if err := s.failure(); err != nil {
		return s.stats, base.OpError("stats", err)
	}
	if s.deferred && found {
		s.skipped()
	}
	if idle {
		s.counted = true
		return s.stats, nil
	}
	local, err := s.lengthOf(s.selected)
	global := 0
	for _, l := range s.result.lists {
		n, e := s.lengthOf(l)
		global = global + n
		err = errors.Join(err, e)
	}
	if s.result.dense != 0 {
		global = s.n
	}
	threshold := s.float(s.used)
	switch s.selector.(type) {
	case nothing:
		local = s.n
		threshold = 0
	case *custom:
		threshold = 0
	}
	s.stats.SelectedLocal = local
	s.stats.SelectedGlobal = global
	s.stats.Threshold = threshold
	s.stats.GlobalThreshold = s.hostState.globalThreshold
	if err != nil {
		return s.stats, base.OpError("stats", err)
	}
	s.counted = true
	return s.stats, nil
}

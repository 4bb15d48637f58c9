package sparse

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// phase is how far a step has come.
type phase uint8

const (
	idle       phase = iota // none was begun
	begun                   // gradient and residual are as before, unless restores says otherwise
	selected                // what is to be sent is taken out of the residual
	exchanged               // the result is submitted
	judged                  // its entries that are not finite are counted
	finished                // the result is written to the gradient: there is no way back
	rolledBack              // gradient and residual are as before
)

// open reports whether a step can be rolled back.
func (p phase) open() bool { return begun <= p && p <= judged }

// restoration is where the residual before a step is.
type restoration uint8

const (
	nothingSaved restoration = iota
	swapped                  // in the origin, which the step reads
	keeping                  // it will be in the origin when the gradient is added
	kept                     // in the origin, from where it is copied back
)

// finding is what an exchange has found out of its result.
type finding uint8

const (
	unknown finding = iota
	finite
	mayBeNonFinite
)

// step is what there is of one step. What later steps need is in engine and Reducer.
type step struct {
	phase  phase
	target gradient        // where the result goes
	picks  runtime.Entries // unless it is dense
	whole  comm.Call       // if it is
	result result
	used   number // where the threshold is that entries were picked by

	restores restoration // the step may be undone, and how
	ago      past        // what to restore of the host's

	inFlight   bool    // the compute stream is to wait for what was submitted
	hostWaited bool    // the host has waited for the device
	finding    finding // of the exchange
	flagged    bool    // the exchange has left that in the flags
	deferred   bool    // the device knows whether it was skipped
	chose      bool    // a pattern, for Auto

	stats, last Stats // of the step, and of the one before
	counted     bool  // stats has what is on the device, too
}

// found notes what an exchange has found out.
func (s *step) found(large bool) {
	s.finding = finite
	if large {
		s.finding = mayBeNonFinite
	}
}

// A step in parts, for a caller that reduces several tensors in one transaction: Select,
// Exchange and Complete, then Commit, or after an error RollBack.

// Input is the gradient of a step that is made in parts.
type Input struct {
	Ptr    uintptr
	DType  dtype.DType
	Factor uintptr // of an F32 on the device that multiplies it, 0 for none
	Lent   bool    // Ptr may be read until Select returns, and written by Commit
}

// Drain waits for communication that a step which failed has left in flight, until ctx is done.
func (s *Reducer) Drain(ctx context.Context) error { return s.order.Drain(ctx) }

// Select begins a step: it adds the gradient to the residual and selects what is to be sent.
// It communicates only before the first step, to choose for [Auto], and to clip
// by the norm of all ranks. After an error, RollBack.
func (s *Reducer) Select(ctx context.Context, in Input) error {
	s.pick(ctx, gradient{ptr: in.Ptr, dt: in.DType, factor: in.Factor, lent: in.Lent})
	return s.err
}

// Exchange makes the result of what all ranks selected.
func (s *Reducer) Exchange(ctx context.Context) error {
	if err := s.in(selected, selected); err != nil {
		return err
	}
	s.combine(ctx)
	return s.err
}

// in returns an error unless the step is in one of some phases.
func (s *Reducer) in(from, to phase) error {
	if s.err == nil && (s.phase < from || s.phase > to) {
		return fmt.Errorf("%w: parts of a step are made in the order Select, Exchange, Complete, Commit", comm.ErrArgument)
	}
	return s.err
}

// InFlight reports whether the compute stream does not wait for the exchange yet.
func (s *Reducer) InFlight() bool { return s.inFlight }

// Complete has the compute stream wait for the exchange, and counts what is not finite. waited
// is whether the host has waited for the device in this step.
func (s *Reducer) Complete(ctx context.Context) (waited bool, err error) {
	if err := s.in(exchanged, exchanged); err != nil {
		return s.hostWaited, err
	}
	s.complete(ctx)
	return s.hostWaited, s.err
}

// Commit ends a step that is complete: it writes the result to the gradient, or skips the step.
// An error stays, because the gradient may be lost.
func (s *Reducer) Commit(v Verdict) error {
	if err := s.in(exchanged, judged); err != nil {
		return err
	}
	s.finish(v)
	return s.err
}

// RollBack ends a step that was begun and not committed: the residual is as before it, bit for
// bit, unless that fails, which stays. Without such a step it does nothing.
func (s *Reducer) RollBack() error {
	s.abandon()
	return s.err
}

// JoinTransaction makes s one of several tensors whose steps pass or are skipped together.
// Complete counts at flags, an I32 of each rank, which entries of the result are not
// finite. A step that is committed as [Deferred] is rolled back by the device if the I32 at
// skip is not 0. The caller compares what the ranks reduce ([Reducer.Terms]), and logs what a
// [Reducer.Rebind] loses. A Rebind ends it.
func (s *Reducer) JoinTransaction(flags, skip uintptr) {
	s.flags, s.skip, s.skips = flags, skip, 1
	s.agreed, s.joined = true, true
}

// PrepareRestore checks what [Reducer.Restore] is given, and waits for the device until ctx is
// done. Nothing has changed until restore is called.
func (s *Reducer) PrepareRestore(ctx context.Context, states ...[]byte) (restore func(context.Context) error, err error) {
	parsed, err := s.parseAll(states)
	if err == nil {
		err = s.settled(ctx)
	}
	return func(ctx context.Context) error { return s.restore(ctx, parsed) }, err
}

// Choices are patterns that were chosen for [Auto], for several tensors: those that are about as
// long, and of one configuration, have the same.
type Choices map[string]string

// Pattern returns the pattern of a tensor of n elements, and chooses it with all ranks if there is
// none for tensors like it.
func (all Choices) Pattern(ctx context.Context, rt runtime.Runtime, c comm.Communicator, n int, dt dtype.DType, cfg Config) (string, error) {
	if _, err := cfg.WithDefaults(); err != nil {
		return "", err
	}
	if err := base.CheckGradientType(dt); err != nil {
		return "", err
	}
	alike := fmt.Sprintf("%v %d %+v", dt, sizeClass(n), cfg)
	if all[alike] == "" {
		choice, err := choose(ctx, rt, c, n, dt, cfg)
		if err != nil {
			return "", err
		}
		all[alike] = choice.Pattern
	}
	return all[alike], nil
}

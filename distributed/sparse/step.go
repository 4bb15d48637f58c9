package sparse

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

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
	s.combine(ctx)
	return s.err
}

// InFlight reports whether the compute stream does not wait for the exchange yet.
func (s *Reducer) InFlight() bool { return s.exchanging }

// Complete has the compute stream wait for the exchange, and counts what is not finite. waited
// is whether the host has waited for the device in this step.
func (s *Reducer) Complete(ctx context.Context) (waited bool, err error) {
	s.complete(ctx)
	return s.waited, s.err
}

// Commit ends a step that is complete: it writes the result to the gradient, or skips the step.
// An error stays, because the gradient may be lost.
func (s *Reducer) Commit(v Verdict) error {
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

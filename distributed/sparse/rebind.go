package sparse

import (
	"context"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Rebind moves s to another communicator, say what is left of the old one after
// a rank has failed. It does not communicate; all ranks of c do it. The residual
// stays as it is, averages are over the ranks of c, and thresholds and partitions
// start anew. What the residual of a rank held that is not part of c is lost with
// that rank; where c has fewer ranks, its rank 0 logs how many went. Ranks of which only
// some have completed the step that failed ([Stats].Step) are a step apart from then
// on: under a [Schedule] that is not over, the next step is [comm.ErrMismatch] on all of
// them until they have restored one step's states ([Reducer.Restore]).
//
// If a step has failed on the old communicator, Rebind waits for that as
// [Reducer.Close] does: close it first. After an error of that wait, or of a
// communicator that is nil or does not reach the memory, s is still with the old
// one; an error of the runtime stays.
func (s *Reducer) Rebind(c comm.Communicator) error {
	had := s.size
	err := s.rebind(c)
	if err == nil && s.cfg.Defers() && !s.joined && s.confirm == nil {
		base.ReportLost(had, c)
	}
	s.joined = s.joined && err != nil
	return base.OpError("rebind", err)
}

func (s *Reducer) rebind(c comm.Communicator) error {
	err := inOrder(s.ready, func() error { return base.Reaches(s.rt, c) }, s.order.DrainToFree, s.learn)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	if s.check(s.leaveShared(ctx, true)); s.err != nil {
		return s.err
	}
	s.release(s.permanent)
	s.meter = metered.New(c)
	s.bind(s.meter)
	s.k, s.selected, s.result = 0, kernel.Entries{}, result{}
	return s.err
}

// learn finds out whether the device skipped the last step, before the numbers are
// those of another communicator.
func (s *Reducer) learn() error {
	if !s.deferred || s.counted {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	counts := make([]int32, s.skips)
	err := s.order.HostAfterCompute(ctx)
	if err == nil {
		err = s.rt.CopyOut(hostmem.Bytes(counts), s.skip)
	}
	if err == nil && slices.ContainsFunc(counts, func(n int32) bool { return n != 0 }) {
		s.skipped()
	}
	s.deferred = s.deferred && err != nil
	return err
}

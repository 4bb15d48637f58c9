package engine

import (
	"context"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Rebind moves s to another communicator. The residual is unchanged; thresholds and partitions start over.
func (s *Reducer) Rebind(c comm.Communicator) error {
	had := s.size
	if err := s.rebind(c); err != nil {
		return base.OpError("rebind", err)
	}
	if s.cfg.Defers() && !s.joined && s.confirm == nil {
		base.ReportLost(&s.skipLog, had, c, "elements", s.n)
	}
	s.joined = false
	return nil
}

func (s *Reducer) rebind(c comm.Communicator) error {
	err := inOrder(s.ready, func() error {
		return base.Reaches(s.rt, c)
	}, s.order.DrainToFree, s.learn)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	s.check(s.freeShared(ctx, true))
	if s.err != nil {
		return s.err
	}
	s.release(s.permanent)
	s.meter = metered.New(c)
	s.bind(s.meter)
	s.k = 0
	s.selected = kernel.Entries{}
	s.result = result{}
	return s.err
}

// learn finds out whether the device skipped the last step, before the numbers are replaced for another communicator.
func (s *Reducer) learn() error {
	if !s.deferred || s.counted {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	counts := make([]int32, s.skips)
	if err := s.order.HostAfterCompute(ctx); err != nil {
		return err
	}
	if err := s.rt.CopyOut(hostmem.Bytes(counts), s.skip); err != nil {
		return err
	}
	if slices.ContainsFunc(counts, func(n int32) bool { return n != 0 }) {
		s.skipped()
	}
	s.deferred = false
	return nil
}

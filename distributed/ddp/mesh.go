package ddp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/engine"
)

// meshed reduces a bucket densely along the inner dimensions of a mesh, and this rank's share of it along
// the outer one by another reducer. It is judged, and copied, as what a [Reducer] reduces.
type meshed struct {
	custom
	between reducer      // reduces the share, between hosts
	share   engine.Input // in the memory
	levels  []level      // the fastest dimension first
	started bool         // the step between the hosts
}

// level is an inner dimension.
type level struct {
	order           base.Order // has its communicator's work and the compute stream wait for each other
	scatter, gather comm.Call  // calls before and after the step between hosts
}

// newMeshed makes what reduces a bucket along a mesh.
func (g *Gradients) newMeshed(i int, b *bucket) (reducer, error) {
	n := g.lines.share(b.len())
	m := &meshed{custom: custom{
		g:  g.transaction,
		n:  b.len(),
		dt: b.dt,
		b:  Bucket{Index: i, Comm: g.meter},
	}}
	m.Reducer = m
	m.order = base.NewOrder(g.transaction.rt, g.meter)
	room := n * g.lines.ranks()
	if err := m.allocate(room); err != nil {
		return nil, err
	}
	from := m.connect(&g.lines, room)
	var parts []Part
	offset := 0
	for _, p := range b.params {
		if first, end := max(from, offset), min(from+n, offset+g.gradients[p].n); first < end {
			parts = append(parts, Part{p, []int{end - first}, first - from})
		}
		offset += g.gradients[p].n
	}
	cfg := b.cfg
	cfg.NonFinite = engine.PassNonFinite // it is judged with the buckets, by the ranks of all hosts
	var err error
	m.between, err = g.compress(i, b, cfg, g.lines.outer, n, parts)
	return m, err
}

// connect makes the calls along the inner dimensions, on a bucket that was padded to room elements. Each
// dimension leaves this rank an equal part, where that lies. It returns where the last one begins.
func (m *meshed) connect(l *lines, room int) (from int) {
	m.levels = nil
	size := m.dt.Size()
	for _, c := range l.inner {
		region := m.memory.Ptr + uintptr(from*size)
		room /= c.WorldSize()
		from += c.Rank() * room
		part := m.memory.Ptr + uintptr(from*size)
		m.levels = append(m.levels, level{base.NewOrder(m.g.rt, c),
			comm.ReduceScatterCall(region, part, room, m.dt, comm.Avg), comm.AllGatherCall(part, region, room, m.dt)})
	}
	m.share = engine.Input{
		Ptr:     m.memory.Ptr + uintptr(from*size),
		DType:   m.dt,
		Scratch: true,
	}
	return from
}

// do makes a call along a dimension.
func (l *level) do(ctx context.Context, call comm.Call) error {
	return l.order.Around(ctx, func() error { return call.Make(l.order.C) })
}

func (m *meshed) Reduce(ctx context.Context, _ Bucket) error {
	end := m.memory.Ptr + uintptr(m.n*m.dt.Size())
	if padding := m.room - m.n; padding > 0 {
		if err := m.g.rt.Fill(end, padding, m.dt, 0); err != nil {
			return err
		}
	}
	for i := range m.levels {
		if err := m.levels[i].do(ctx, m.levels[i].scatter); err != nil {
			return err
		}
	}
	m.started = true
	if err := m.step(ctx); err != nil {
		return err
	}
	for i := range slices.Backward(m.levels) {
		if err := m.levels[i].do(ctx, m.levels[i].gather); err != nil {
			return err
		}
	}
	return nil
}

// step is that between the hosts.
func (m *meshed) step(ctx context.Context) error {
	if err := m.between.Select(ctx, m.share); err != nil {
		return err
	}
	if err := m.between.Exchange(ctx); err != nil {
		return err
	}
	if _, err := m.between.Complete(ctx); err != nil {
		return err
	}
	return m.between.Commit(engine.Passes)
}

// Memory implements [Reducer]. The reducer between the hosts keeps all state between steps.
func (m *meshed) Memory() Memory { return Memory{} }

func (m *meshed) Drain(ctx context.Context) error {
	for i := range m.levels {
		if err := m.levels[i].order.Drain(ctx); err != nil {
			return err
		}
	}
	if err := m.custom.Drain(ctx); err != nil {
		return err
	}
	return m.between.Drain(ctx)
}

func (m *meshed) Commit(v engine.Verdict) error {
	if v == engine.Skips {
		if err := m.RollBack(); err != nil {
			return err
		}
	}
	m.started = false
	return m.custom.Commit(v)
}

func (m *meshed) RollBack() error {
	if !m.started {
		return nil // the last step between the hosts is an earlier one
	}
	m.started = false
	return m.between.RollBack()
}

// JoinTransaction implements reducer. The ranks of all hosts have compared what they reduce.
func (m *meshed) JoinTransaction(flags, skip uintptr) {
	m.custom.JoinTransaction(flags, skip)
	m.between.JoinTransaction(flags, skip)
}

func (m *meshed) Terms() string {
	sizes := []int{}
	for i := range m.levels {
		sizes = append(sizes, m.levels[i].order.C.WorldSize())
	}
	return fmt.Sprintf("within %v ranks, %s", sizes, m.between.Terms())
}

// Skipped implements reducer: of this rank's share.
func (m *meshed) Skipped(ctx context.Context) (bool, error) {
	return m.between.Skipped(ctx)
}

func (m *meshed) State(ctx context.Context) ([]byte, error) {
	return m.between.State(ctx)
}

func (m *meshed) SharedState(ctx context.Context) ([]byte, error) {
	return m.between.SharedState(ctx)
}

func (m *meshed) PrepareRestore(ctx context.Context, states ...[]byte) (func(context.Context) error, error) {
	return m.between.PrepareRestore(ctx, states...)
}

func (m *meshed) ScaleResidual(factor float64) error {
	return m.between.ScaleResidual(factor)
}

// rebind moves to another mesh, in which this rank has the same share.
func (m *meshed) rebind(l *lines, to comm.Communicator) error {
	before := m.share
	if len(l.inner) != len(m.levels) || l.share(m.n)*l.ranks() != m.room {
		return errOtherShare
	}
	for i := range m.levels {
		if err := m.levels[i].order.DrainToFree(); err != nil {
			return err
		}
	}
	if err := m.custom.Rebind(to); err != nil {
		return err
	}
	m.connect(l, m.room)
	if m.share != before {
		return errOtherShare
	}
	return m.between.Rebind(l.outer)
}

var errOtherShare = fmt.Errorf("%w: this rank has another share of the buckets in the new mesh, "+
	"want the same ranks within a host", comm.ErrUnsupported)

func (m *meshed) Close() error {
	var errs []error
	for i := range m.levels {
		errs = append(errs, m.levels[i].order.DrainToFree())
	}
	if m.between != nil {
		errs = append(errs, m.between.Close())
	}
	return errors.Join(append(errs, m.custom.Close())...)
}

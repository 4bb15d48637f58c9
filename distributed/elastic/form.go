package elastic

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/runtime"
)

// Next returns the epoch of the next step: the same one, or another if the last vote has found
// members that come or go, or if failed, the error of the step, is not nil. Then its communicator
// is new, the trainer is bound to it, and a member that joined has its state.
//
// It waits for others as long as ctx and the number of members need, returns [ErrLeft] after [Member.Leave], and
// [ErrStore] when the store has been out of reach for Config.Patience. When epochs could be formed for
// so long, but not begin, it returns why, and [ErrEnded] when the others have made the last step. Next may be called again
// after that, and the member joins when it can. It is refused as by [Join] where it finds the others only now.
func (m *Member) Next(ctx context.Context, failed error) (*Epoch, error) {
	m.caller = ctx
	if failed != nil {
		m.fail(failed)
	}
	var failing time.Time // since then no epoch could begin
	for times := 0; ; times++ {
		if m.formed == nil {
			if m.epoch != nil {
				broken := m.epoch.Comm.Err() // by another member, perhaps
				if broken == nil && !m.ask {
					return m.epoch, nil
				}
				if broken == nil {
					broken = m.handOver(ctx)
				}
				m.fail(broken)
			}
			if err := m.form(ctx); err != nil {
				return nil, fmt.Errorf("elastic: %s: %w", m.cfg.Name, err)
			}
		}
		e := m.formed
		err := m.bind(ctx, e)
		if m.formed = nil; err == nil {
			m.epoch = e
			return e, nil
		}
		_ = comm.CloseAll(e.Comm, err)
		if failing.IsZero() {
			failing = time.Now()
		}
		if !lost(err) || ctx.Err() != nil || time.Since(failing) > m.cfg.Patience {
			return nil, fmt.Errorf("elastic: %s: %w", m.cfg.Name, err)
		}
		slog.Warn("elastic: an epoch failed before its first step", "member", m.cfg.Name, "epoch", e.Number, "err", err)
		m.pause(min(time.Millisecond<<min(times, 20), m.cfg.Silence/10))
	}
}

// fail closes the communicator that is used, because of an error or because another one takes its place.
func (m *Member) fail(cause error) {
	if m.epoch != nil {
		_ = comm.CloseAll(m.epoch.Comm, cause)
	}
}

// Commit votes that this member can commit its step, and returns nil if all do. It is called by all members
// between the exchange of a step, for which it waits, and what cannot be rolled back. An error means that the step is rolled back
// and made again: if it is that of a lost member, [Member.Next] has the epoch in which.
func (m *Member) Commit(ctx context.Context) error {
	e := m.epoch
	if e == nil {
		return fmt.Errorf("elastic: %w: Commit without an epoch", comm.ErrArgument)
	}
	if err := e.Comm.Sync(ctx); err != nil { // without the result of the exchange
		return fmt.Errorf("elastic: %s: %w", m.cfg.Name, err)
	}
	vote, err := m.vote(ctx, e)
	if err == nil {
		if err := e.agree(vote); err != nil {
			_ = e.Comm.Barrier(ctx) // all have the vote, before any of them goes
			return err
		}
		m.ask, m.leaves = vote[0] != 0, nil
		for rank := range e.Members {
			if vote[1+rank] != 0 {
				m.leaves = append(m.leaves, rank)
			}
		}
		m.change(func() {
			m.status.Step, m.status.Leaving = m.status.Step+1, vote[1+e.Comm.Rank()] != 0
			m.ends = len(m.leaves) == len(e.Members)
		})
		e.hash = 0
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("elastic: %s: %w", m.cfg.Name, err)
	}
	m.fail(err)
	step := m.Steps()
	m.change(func() { m.status.Prepared = true })
	formErr := m.form(ctx)
	m.change(func() { m.status.Prepared = false })
	switch {
	case formErr != nil:
		return fmt.Errorf("elastic: %s: %w: %w", m.cfg.Name, comm.ErrPeerFailed, formErr)
	case m.now().Fresh || m.Steps() == step:
		return fmt.Errorf("elastic: %s: step %d is made again: %w", m.cfg.Name, step+1, err)
	}
	return nil
}

// vote gathers the votes of all members: whether any knows of members that come or go, then of each whether it goes,
// and its hash.
func (m *Member) vote(ctx context.Context, e *Epoch) (words []int64, err error) {
	size, rank := len(e.Members), e.Comm.Rank()
	words = make([]int64, 1+2*size)
	m.mu.Lock()
	if m.status.Wishes {
		words[0], words[1+rank] = 1, 1
	} else if v, _ := m.look(); v.comes(e.record) {
		words[0] = 1
	}
	m.mu.Unlock()
	words[1+size+rank] = e.hash
	return words, communicate(ctx, m, e, words, func(t *runtime.Tensor) error { return distributed.AllReduce(ctx, e.Comm, t, comm.Max) })
}

// comes reports whether a member waits to join, and there is room.
func (v *view) comes(r *record) bool {
	return (v.max == 0 || len(r.Members) < v.max) &&
		slices.ContainsFunc(v.present, func(s status) bool {
			return s.Waiting && !s.Leaving && r.rank(s.person()) < 0 && v.ready(r, &s)
		})
}

// form waits at the boundary until the next epoch has a communicator. Then it is m.formed, and Step says
// whether a step that was prepared is committed.
func (m *Member) form(ctx context.Context) error {
	m.ask, m.leaves = false, nil
	for {
		r, err := m.await(ctx)
		if err != nil {
			return err
		}
		own := m.now()
		if err := r.checkEntry(&own); err != nil {
			return err
		}
		began := time.Now()
		c, err := m.establish(ctx, r)
		m.failed = err
		if err == nil {
			m.formed = &Epoch{Number: r.Number, Comm: c, Joined: r.Members[c.Rank()].Fresh, record: r}
			m.change(func() {
				m.ends = false
				m.status.Formed = true
				m.status.Step = r.Step
				m.status.Prepared = false
				m.status.Fresh = m.formed.Joined
				m.used = m.formed
				m.miss()
			})
			m.publish()
			for _, p := range r.Members {
				m.formed.Members = append(m.formed.Members, p.Name)
			}
			return nil
		}
		if ctx.Err() != nil || m.ctx.Err() != nil || errors.Is(err, comm.ErrMismatch) || !lost(err) && !errors.Is(err, store.ErrRefused) { // an address may be that of a later epoch
			return err
		}
		// What is missing early may have been about to come.
		if missing := interface{ MissingRanks() []int }(nil); errors.As(err, &missing) && time.Since(began) >= m.cfg.Patience/2 {
			m.change(func() { m.status.Unreached = missing.MissingRanks() })
		}
		slog.Warn("elastic: an epoch could not be formed", "member", m.cfg.Name, "epoch", r.Number, "err", err)
	}
}

// establish makes the communicator of an epoch. It stops when a member is gone, or at another boundary.
func (m *Member) establish(ctx context.Context, r *record) (c comm.Communicator, err error) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Patience)
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	m.mu.Lock()
	kv, rank := m.kv, r.rank(m.status.person())
	since := m.since
	m.mu.Unlock()
	if kv == nil {
		return nil, fmt.Errorf("%w: the store is lost", comm.ErrPeerFailed)
	}
	go func() {
		if err := m.until(ctx, func() (bool, error) { return false, m.obstacle(r, since) }); err != nil {
			stop(err)
		}
	}()
	c, err = m.cfg.Form(ctx, &retryStore{kv, m.refusals}, Place{Rank: rank, Size: len(r.Members), World: r.World})
	switch {
	case err != nil && ctx.Err() != nil: // whatever Form makes of it
		return nil, fmt.Errorf("%w: %w: %w", comm.ErrPeerFailed, context.Cause(ctx), err)
	case err != nil:
		return nil, err
	}
	if c.Rank() != rank || c.WorldSize() != len(r.Members) {
		return nil, errors.Join(fmt.Errorf("%w: Form made rank %d of %d, want %d of %d", comm.ErrArgument, c.Rank(), c.WorldSize(), rank, len(r.Members)), c.Close())
	}
	examined, err := instrument.Epoch(m.caller, m.cfg.Runtime, c, r.Number)
	if err != nil {
		return nil, errors.Join(err, comm.CloseAll(c, err))
	}
	if err := examined.Barrier(ctx); err != nil {
		_ = comm.CloseAll(examined, err)
		return nil, fmt.Errorf("%w: %w", comm.ErrPeerFailed, err)
	}
	return examined, nil
}

// obstacle returns why an epoch will not be formed, as the session of a time says. mu is held.
func (m *Member) obstacle(r *record, since time.Time) error {
	if m.kv == nil || !m.since.Equal(since) {
		return nil // it may need no store any more
	}
	var gone []string
	v, _ := m.look()
	for _, p := range r.Members {
		i := slices.IndexFunc(v.present, func(s status) bool { return s.person().same(p) })
		if i < 0 {
			gone = append(gone, printable.Text(p.Name))
		} else if a := v.present[i].Accepted; v.present[i].Waiting && a != nil && a.World == r.World && p.Name != m.cfg.Name {
			gone = append(gone, printable.Text(p.Name))
		}
	}
	if len(gone) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", comm.ErrPeerFailed, strings.Join(gone, ", "))
}

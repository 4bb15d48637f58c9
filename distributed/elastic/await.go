package elastic

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/printable"
)

// vigil is a member's wait for the next epoch.
type vigil struct {
	began     time.Time     // when the wait began; set once
	logAfter  time.Duration // when the log says what the member waits for
	held      time.Time     // when somebody with the state was here, or the store was out of reach
	roll      rollCall      // of the last epoch's members that are not here; begins anew when the store is out of reach
	delivered time.Time     // when the store had this member's status, or was out of reach
	holdoff   holdoff       // after attempts that failed for this member
	refused   refusals      // of epochs that it has proposed
	refusal   error         // the last of these, nil before one
	propose   time.Time     // when it may propose the next one, zero if at once
}

// holdoff is a member's wait after attempts that failed for it.
type holdoff struct {
	attempts int       // that failed, one after the other; 0 if the last one did not
	told     time.Time // of the last attempt
}

// rested is how long the member has waited after a number of attempts.
func (h *holdoff) rested(attempts int) time.Duration {
	if attempts != h.attempts {
		h.attempts = attempts
		h.told = time.Now()
	}
	return time.Since(h.told)
}

// await waits at a boundary for the next epoch, which it writes if nobody else does, and enters it. At the boundary
// the member stands as given.
func (m *Member) await(ctx context.Context, s standing) (*record, error) {
	m.change(func() { m.status.Standing = s })
	defer m.change(func() {
		if m.status.Standing == prepared { // enter changes the standing, so the wait has failed
			m.withdrawn = m.status.reach()
		}
		m.status.Standing = m.status.Standing.inside()
	})
	now := time.Now()
	w := &vigil{
		began:     now,
		logAfter:  m.cfg.Silence,
		held:      now,
		delivered: now,
		refused:   m.refusals(),
	}
	for {
		m.mu.Lock()
		kv := m.kv
		changed := m.changed
		fault := m.fault
		k, version := m.knowledge(w)
		m.mu.Unlock()
		if fault != nil {
			return nil, fault
		}
		d := k.decide()
		if d.propose != nil && time.Now().Before(w.propose) {
			d = decision{reason: explain("the store does not take an epoch", w.refusal)}
		}
		switch {
		case d.err != nil:
			return nil, d.err
		case d.publish:
			m.publish()
		case d.commit:
			m.change(func() {
				m.status.Step++
				m.status.Standing = boundary
			})
		case d.retry > 0:
			m.change(func() { m.status.BackedOff = d.retry })
		case d.rejoin != nil:
			m.rejoin(d.rejoin)
		case d.enter != nil:
			return d.enter, m.enter(d.enter)
		case d.propose != nil:
			if err := m.propose(ctx, kv, w, d.propose, version); err != nil {
				return nil, err
			}
		default:
			if err := m.watch(ctx, w, d.reason, changed); err != nil {
				return nil, err
			}
		}
	}
}

// watch waits for a change, or until the clock is to be looked at.
func (m *Member) watch(ctx context.Context, w *vigil, reason string, changed <-chan struct{}) error {
	if waited := time.Since(w.began); waited > w.logAfter {
		w.logAfter *= 2
		slog.Info("elastic: no next epoch yet",
			"member", m.cfg.Name, "reason", reason, "waited", waited.Round(time.Second/10))
	}
	select {
	case <-changed:
	case <-time.After(m.cfg.glance()):
	case <-ctx.Done():
		return fmt.Errorf("%w (%s)", comm.ContextError(ctx), reason)
	case <-m.ctx.Done():
		return ErrLeft
	}
	return nil
}

// knowledge is what this member knows, and the version of the epoch in the store. mu is held.
func (m *Member) knowledge(w *vigil) (k knowledge, version uint64) {
	k.view, version = m.look()
	k.self = m.status
	k.refusal = m.refusal
	k.failure = m.failure
	k.withdrawn = m.withdrawn
	k.ends = m.ends
	now := time.Now()
	reached := m.kv != nil
	delivered := !m.statusClaim.due()
	if !reached || delivered {
		w.delivered = now
	}
	if !reached || k.held() {
		w.held = now
	}
	text, _ := json.Marshal(m.status)
	switch {
	case m.statusClaim.want != string(text):
		k.publication = outdated
	case !reached:
		k.publication = offline
	case delivered:
		k.publication = stored
	case now.Sub(w.delivered) > m.cfg.limit:
		k.publication = refused
	default:
		k.publication = pending
	}
	k.orphaned = now.Sub(w.held)
	k.waited = now.Sub(w.began)
	k.late = m.late
	k.patience = m.cfg.Patience
	if !reached {
		w.roll = rollCall{}
	}
	if last := k.last(); last != nil {
		k.missed = w.roll.look(k.missing(last), now)
		k.rested = w.holdoff.rested(last.attempts(m.cfg.Name))
	}
	return k, version
}

// enter has this member make the communicator of an epoch.
func (m *Member) enter(r *record) error {
	self := m.now()
	if err := r.checkEntry(&self); err != nil {
		return err
	}
	m.change(func() {
		m.epoch = &Epoch{Number: r.Number, record: r}
		m.status.Standing = m.status.Standing.inside()
		if r.Members[r.rank(self.person())].Fresh { // also one that was cut off, with a state that the others have left
			m.status.Standing = fresh
		}
		m.status.Entered = r.World
		m.status.Unreached = nil
		m.late = nil
	})
	m.publish()
	return nil
}

// rejoin makes this member one without state: the others have gone on to an epoch without it.
func (m *Member) rejoin(r *record) {
	attempts := r.attempts(m.cfg.Name)
	self := m.now()
	switch {
	case r.rank(self.person()) >= 0:
		slog.Warn("elastic: the others have committed a step that this member has rolled back, and it joins again",
			"member", m.cfg.Name, "epoch", r.Number, "step", r.Step)
	case attempts > 0:
		slog.Warn("elastic: the others had no connection to this member, and go on without it; it tries again later",
			"member", m.cfg.Name, "epoch", r.Number, "attempts", attempts,
			"later", backoff(attempts, m.cfg.limit), "err", m.failure)
	default:
		slog.Warn("elastic: the others have gone on without this member, which joins again",
			"member", m.cfg.Name, "epoch", r.Number)
	}
	m.change(func() {
		m.epoch = nil
		m.status.Incarnation = rand.Text()
		m.status.Standing = joining
		m.status.Entered = ""
		m.status.Formed = ""
		m.status.Unreached = nil
		m.status.BackedOff = 0
	})
}

// propose writes an epoch to the store, unless another member has. One that the store refuses is proposed again, ever
// later. The error is ctx's, or that no epoch can follow the one in the store, whose numbers are at their end:
// members write no such one, and would ignore its successor.
func (m *Member) propose(ctx context.Context, kv store.Store, w *vigil, r *record, version uint64) error {
	if r.World == "" {
		r.World = rand.Text()
	}
	if err := r.check(); err != nil {
		return fmt.Errorf("%w: no epoch follows the one in the store: epoch %d has %w", comm.ErrMismatch, r.Number, err)
	}
	text, _ := json.Marshal(r)
	bounded, cancel := context.WithTimeout(ctx, m.cfg.limit)
	defer cancel()
	_, ok, err := kv.CompareAndSet(bounded, epochKey, version, text)
	if ctx.Err() != nil {
		return comm.ContextError(ctx)
	}
	if err != nil {
		w.refusal = err
		w.propose = time.Now().Add(w.refused.add(epochKey, err))
		return nil
	}
	w.refused.times = 0
	if hung := m.hung(r); ok && len(hung) > 0 {
		slog.Warn("elastic: going on without members that live, but do not come: do they hang? "+
			"Config.Patience has the others wait longer",
			"member", m.cfg.Name, "epoch", r.Number, "hung", strings.Join(hung, ", "), "patience", m.cfg.Patience)
	}
	if ok && m.epoch != nil && sum(r.Failed) > sum(m.epoch.record.Failed) {
		slog.Warn("elastic: going on without members that have no connection to the others",
			"member", m.cfg.Name, "epoch", r.Number, "attempts", r.Failed)
	}
	return nil
}

// hung are the members that an epoch leaves out though they are in the store.
func (m *Member) hung(r *record) (names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, _ := m.look()
	for _, s := range v.present {
		if slices.Contains(r.Lost, s.Name) && !s.Standing.waits() {
			names = append(names, printable.Text(s.Name))
		}
	}
	return names
}

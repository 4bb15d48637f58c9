package elastic

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// vigil is a member's wait for the next epoch.
type vigil struct {
	began   time.Time
	log     time.Duration // how long it has lasted when the log says so
	held    time.Time     // when somebody with the state was here, or no store was in reach
	stored  time.Time     // when the store had this member's status, or none was in reach
	holdoff holdoff       // after attempts that failed for this member
	refused refusals      // of epochs that it has proposed
	refusal error         // the last of these, nil before one
	propose time.Time     // when it may propose the next one
}

// await waits for the record of the next epoch, and writes it if nobody else does.
func (m *Member) await(ctx context.Context) (*record, error) {
	m.change(func() { m.status.Waiting = true })
	defer m.change(func() { m.status.Waiting = false })
	began := time.Now()
	w := &vigil{began: began, log: m.cfg.Silence, held: began, stored: began, refused: m.refusals()}
	for {
		m.mu.Lock()
		kv, changed, fault := m.kv, m.changed, m.fault
		b, version := m.boundary()
		m.mu.Unlock()
		if fault != nil {
			return nil, fault
		}
		w.time(&b, m.cfg.Patience)
		do, r, why := b.decide()
		if do == propose && time.Now().Before(w.propose) {
			do = wait
			why = explain("the store does not take an epoch", w.refusal)
		}
		switch do {
		case leave:
			return nil, ErrLeft
		case end:
			return nil, ErrEnded
		case cutOff:
			return nil, fmt.Errorf("%w: %s", ErrStore, why)
		case fail:
			return nil, fmt.Errorf("the others had no connection to it in %d attempts: %w", b.attempts(), m.failed)
		case tell:
			m.publish()
		case retry:
			m.change(func() { m.status.BackedOff = b.attempts() })
		case enter:
			m.enter(r)
			return r, nil
		case accept:
			m.change(func() {
				m.status.Accepted = r
				m.status.Formed = false
			})
		case rejoin:
			m.rejoin(r)
		case propose:
			if err := m.propose(ctx, kv, w, r, version); err != nil {
				return nil, err
			}
		case wait:
			if waited := time.Since(began); waited > w.log {
				w.log *= 2
				slog.Info("elastic: no next epoch yet",
					"member", m.cfg.Name, "why", why, "waited", waited.Round(time.Second/10))
			}
			select {
			case <-changed:
			case <-time.After(m.cfg.Silence / 8): // to look at the time
			case <-ctx.Done():
				return nil, fmt.Errorf("%w (%s)", comm.ContextError(ctx), why)
			case <-m.ctx.Done():
				return nil, ErrLeft
			}
		}
	}
}

// boundary is what this member knows, but for how long it has waited, and the version of the epoch in the store. mu is
// held.
func (m *Member) boundary() (b boundary, version uint64) {
	text, _ := json.Marshal(m.status)
	b.view, version = m.look()
	b.own = m.status
	b.told = m.statusClaim.want == string(text)
	b.stored = !m.statusClaim.due()
	b.refusal = m.refusal
	b.failed = m.failed
	b.reached = m.kv != nil
	b.ends = m.ends
	return b, version
}

// time completes what a member knows.
func (w *vigil) time(b *boundary, patience time.Duration) {
	now := time.Now()
	if !b.reached || b.held() {
		w.held = now
	}
	if !b.reached || b.stored {
		w.stored = now
	}
	b.lost = now.Sub(w.held) > patience
	b.refused = now.Sub(w.stored) > patience
	b.impatient = now.Sub(w.began) > patience
	b.backedOff = w.holdoff.over(b.attempts(), patience)
}

// enter has this member form the communicator of an epoch.
func (m *Member) enter(r *record) {
	m.change(func() {
		m.status.Accepted = r
		m.status.Formed = false
		m.status.Waiting = false
		m.status.Unreached = nil
	})
	m.publish()
}

// rejoin makes this member one without state: the others have gone on to an epoch without it.
func (m *Member) rejoin(r *record) {
	if attempts := r.attempts(m.cfg.Name); attempts > 0 {
		slog.Warn("elastic: the others had no connection to this member, and go on without it; it tries again later",
			"member", m.cfg.Name, "epoch", r.Number, "attempts", attempts,
			"later", backoff(attempts, m.cfg.Patience), "err", m.failed)
	} else {
		slog.Warn("elastic: the others have gone on without this member, which joins again",
			"member", m.cfg.Name, "epoch", r.Number)
	}
	m.change(func() {
		m.status.Accepted = r
		m.status.Formed = false
		m.status.Prepared = false
		m.status.Unreached = nil
		m.status.BackedOff = 0
		m.status.Incarnation = rand.Text()
		m.status.Fresh = true
	})
}

// propose writes an epoch to the store, unless another member has. One that the store refuses is proposed again, ever
// later. The error is that of ctx, or that no epoch can follow the one in the store, whose numbers are at their end: members
// write no such one, and would ignore its successor.
func (m *Member) propose(ctx context.Context, kv store.Store, w *vigil, r *record, version uint64) error {
	r.World = rand.Text()
	if err := r.check(); err != nil {
		return fmt.Errorf("%w: no epoch follows the one in the store: epoch %d has %w", comm.ErrMismatch, r.Number, err)
	}
	text, _ := json.Marshal(r)
	bounded, cancel := context.WithTimeout(ctx, m.cfg.Patience)
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
	if last := m.now().Accepted; ok && last != nil && failures(r.Failed) > failures(last.Failed) {
		slog.Warn("elastic: going on without members that have no connection to the others",
			"member", m.cfg.Name, "epoch", r.Number, "attempts", r.Failed)
	}
	return nil
}

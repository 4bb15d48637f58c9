package elastic

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// claim is a key that this member writes. Its writer compares what the member wants with what the store has, so that a
// write that was refused is repeated, and one that has happened is not, whatever the store has said of it.
type claim struct {
	key     string
	options []store.Option
	want    string // "" if nothing is to be written
	exists  bool   // the store has the key, as far as is known
	stored  string // what it has, "" without the key
	version uint64 // of stored, or of the key's deletion; 0 if there was no such key
}

// due reports whether the store is to be changed.
func (c *claim) due() bool { return c.want != "" && (!c.exists || c.want != c.stored) }

// hear takes an event of the store's. Earlier ones than a write that was confirmed may come after it.
func (c *claim) hear(e store.Event) {
	if e.Version <= c.version {
		return
	}
	c.version = e.Version
	c.exists = !e.Deleted
	c.stored = ""
	if c.exists {
		c.stored = string(e.Value)
	}
}

// write makes the store have what is wanted, unless another process has changed the key: then the next write begins
// from there. now is the entry after that, zero if there is none.
func (c *claim) write(ctx context.Context, kv store.Store) (now store.Entry, err error) {
	version := uint64(0)
	if c.exists { // perhaps with an empty value, which no member writes
		version = c.version
	}
	now, _, err = kv.CompareAndSet(ctx, c.key, version, []byte(c.want), c.options...)
	return now, err
}

// forget begins anew, with a session that knows nothing of the store.
func (c *claim) forget() {
	c.exists = false
	c.stored = ""
	c.version = 0
}

// settle takes the answer to a write.
func (c *claim) settle(now store.Entry) {
	switch {
	case now.Version == 0: // somebody has deleted it
		c.exists = false
		c.stored = ""
	case now.Version >= c.version:
		c.exists = true
		c.stored = string(now.Value)
		c.version = now.Version
	}
}

// publish has the others told this member's status. keep does it, in the next session if this one is lost.
func (m *Member) publish() {
	m.mu.Lock()
	text, _ := json.Marshal(m.status)
	m.statusClaim.want = string(text)
	m.mu.Unlock()
	m.wake()
}

// wake has keep look at the claims.
func (m *Member) wake() {
	select {
	case m.wakeup <- struct{}{}:
	default:
	}
}

// keep writes this member's claims to a store until the session or the member ends. A write that the store refuses is
// repeated.
func (m *Member) keep(kv store.Store) {
	refused := m.refusals()
	for {
		m.mu.Lock()
		c := m.due()
		var next claim
		if c != nil {
			next = *c
		}
		m.mu.Unlock()
		var retry <-chan time.Time // nil unless a write was refused
		if c != nil {
			ctx, cancel := context.WithTimeout(m.ctx, m.cfg.Patience)
			now, err := next.write(ctx, kv)
			cancel()
			m.change(func() {
				if m.refusal = err; err == nil {
					c.settle(now)
				}
			})
			if err == nil {
				refused.times = 0
				continue
			}
			if kv.Err() == nil && m.ctx.Err() == nil {
				retry = time.After(refused.add(next.key, err))
			}
		}
		wakeup := m.wakeup
		if retry != nil {
			wakeup = nil // a newer status is refused as well
		}
		select {
		case <-retry:
		case <-wakeup:
		case <-kv.Done():
			return
		case <-m.ctx.Done():
			return
		}
	}
}

// due is a claim that the store does not have, nil if there is none. mu is held.
func (m *Member) due() *claim {
	switch {
	case m.statusClaim.due():
		return &m.statusClaim
	case m.ending():
		return &m.endClaim
	}
	return nil
}

// ending reports whether the store is still to be told that the job has ended. An epoch that others have gone on from
// is not its last one. mu is held.
func (m *Member) ending() bool {
	v, _ := m.look()
	return m.endClaim.due() && v.record != nil && v.record.World == m.endClaim.want
}

// over has the store say that the last step is made, in an epoch or while the next one was formed. It waits until that
// is so, for Config.Patience at most: who comes later would wait for members that have the state.
func (m *Member) over(e *Epoch) {
	e = cmp.Or(m.formed, e)
	m.change(func() { m.endClaim.want = e.record.World })
	m.wake()
	ctx, cancel := context.WithTimeout(m.ctx, m.cfg.Patience)
	defer cancel()
	var refusal error
	err := m.until(ctx, func() (bool, error) {
		refusal = m.refusal
		return m.kv != nil && !m.ending(), nil
	})
	if err != nil {
		slog.Warn("elastic: the store does not know that the job has ended: members that join wait for the others",
			"member", m.cfg.Name, "epoch", e.Number, "err", cmp.Or(refusal, err))
	}
}

// retryStore is a store that repeats each write until that is taken, the session has ended, or the context ends.
type retryStore struct {
	store.Store
	refusals func() refusals
}

// Set implements [store.Store].
func (s *retryStore) Set(ctx context.Context, key string, value []byte, options ...store.Option) error {
	return s.repeat(ctx, key, func(bool) error { return s.Store.Set(ctx, key, value, options...) })
}

// CompareAndSet implements [store.Store].
func (s *retryStore) CompareAndSet(
	ctx context.Context, key string, version uint64, value []byte, options ...store.Option,
) (now store.Entry, ok bool, err error) {
	err = s.repeat(ctx, key, func(repeated bool) (err error) {
		now, ok, err = s.Store.CompareAndSet(ctx, key, version, value, options...)
		if repeated && err == nil && !ok {
			ok = bytes.Equal(now.Value, value) // an earlier attempt was made
		}
		return err
	})
	return now, ok, err
}

func (s *retryStore) repeat(ctx context.Context, key string, write func(repeated bool) error) error {
	refused := s.refusals()
	for {
		err := write(refused.times > 0)
		if err == nil || ctx.Err() != nil || s.Err() != nil || permanent(err) {
			return err
		}
		select {
		case <-time.After(refused.add(key, err)):
		case <-s.Done():
			return err
		case <-ctx.Done():
			return err
		}
	}
}

// permanent reports whether a write is refused for what it is.
func permanent(err error) bool {
	return errors.Is(err, comm.ErrArgument) || errors.Is(err, comm.ErrUnsupported) || errors.Is(err, comm.ErrMismatch)
}

// refusals are writes that a store has refused, one after the other.
type refusals struct {
	member      string
	least, most time.Duration // until the next attempt
	times       int           // in a row
}

func (m *Member) refusals() refusals {
	return refusals{member: m.cfg.Name, least: m.cfg.Silence / 10, most: m.cfg.Silence}
}

// add notes a refusal, logs it ever more rarely, and returns how long to wait until the next attempt: ever longer.
func (r *refusals) add(key string, err error) time.Duration {
	if r.times++; r.times&(r.times-1) == 0 {
		slog.Warn("elastic: the store refuses a write, which is repeated",
			"member", r.member, "key", key, "err", err, "times", r.times)
	}
	return min(r.least<<min(r.times-1, 10), r.most)
}

// explain says why the store does not have what a member says.
func explain(text string, refusal error) string {
	if refusal == nil {
		return text
	}
	return fmt.Sprintf("%s: %v", text, refusal)
}

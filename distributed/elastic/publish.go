package elastic

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/repeats"
)

// claim is a key that this member writes. Its writer compares what the member wants with what the store has, so that a
// write that was refused is repeated, and one that has happened is not, whatever the store has said of it.
type claim struct {
	key     string         // of the store; never changed
	options []store.Option // with which it is set; nil without any
	want    string         // "" if nothing is to be written
	exists  bool           // the store has the key, as far as is known
	stored  string         // what it has, "" without the key
	version uint64         // of stored, or of the key's deletion; 0 if there was no such key
}

// due reports whether the store is to be changed.
func (c *claim) due() bool {
	return c.want != "" && (!c.exists || c.want != c.stored)
}

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

// confirm takes the answer to a write.
func (c *claim) confirm(now store.Entry) {
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

// keep writes this member's claims to the store until the session or the member ends. A write that the store refuses is
// repeated.
func (m *Member) keep(kv store.Store) {
	refused := m.refusals()
	for {
		written, err := m.write(kv)
		if written != "" && err == nil {
			refused.times = 0
			continue
		}
		wakeup := m.wakeup
		var retry <-chan time.Time // nil unless a write was refused
		if err != nil && kv.Err() == nil && m.ctx.Err() == nil {
			retry = time.After(refused.add(written, err))
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

// write writes a claim that the store does not have, and returns its key, "" if there is none.
func (m *Member) write(kv store.Store) (key string, err error) {
	m.mu.Lock()
	c := m.due()
	if c == nil {
		m.mu.Unlock()
		return "", nil
	}
	draft := *c
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(m.ctx, m.cfg.limit)
	defer cancel()
	now, err := draft.write(ctx, kv)
	m.change(func() {
		m.refusal = err
		if err == nil {
			c.confirm(now)
		}
	})
	return draft.key, err
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

// finishJob has the store say that the last step is made, in an epoch or while the next one was formed. It waits
// until that is so, for five times Silence at most: who comes later would wait for members that have the state.
func (m *Member) finishJob(e *Epoch) {
	if m.epoch != nil && m.epoch.Comm != nil { // Commit may have formed another one in the last step
		e = m.epoch
	}
	m.change(func() { m.endClaim.want = e.record.World })
	m.wake()
	ctx, cancel := context.WithTimeout(m.ctx, m.cfg.limit)
	defer cancel()
	var refusal error
	err := m.wait(ctx, func() (bool, error) {
		refusal = m.refusal
		return m.kv != nil && !m.ending(), nil
	})
	if err == nil {
		return
	}
	if refusal != nil {
		err = refusal
	}
	slog.Warn("elastic: the store does not know that the job has ended: members that join wait for the others",
		"member", m.cfg.Name, "epoch", e.Number, "err", err)
}

// retryStore is a store that repeats each write until that is taken, the session has ended, or the context ends.
type retryStore struct {
	store.Store
	refusals func() refusals // begins the count of a write
}

// Set implements [store.Store].
func (s *retryStore) Set(ctx context.Context, key string, value []byte, options ...store.Option) error {
	return s.repeat(ctx, key, func(bool) error {
		return s.Store.Set(ctx, key, value, options...)
	})
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
		if err == nil || permanent(err) {
			return err
		}
		if s.Err() != nil { // which another session may succeed after
			return fmt.Errorf("%w: %w", s.Err(), err)
		}
		if ctx.Err() != nil { // which another attempt may succeed after
			return fmt.Errorf("%w: %w", comm.ErrTimeout, err)
		}
		select {
		case <-time.After(refused.add(key, err)):
		case <-s.Done():
			return fmt.Errorf("%w: %w", s.Err(), err)
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", comm.ErrTimeout, err)
		}
	}
}

// permanent reports whether a write is refused for what it is.
func permanent(err error) bool {
	return errors.Is(err, comm.ErrArgument) || errors.Is(err, comm.ErrUnsupported) || errors.Is(err, comm.ErrMismatch)
}

// refusals are writes that a store has refused, one after the other.
type refusals struct {
	member      string        // whose writes they are, for errors and logs
	first, last time.Duration // waits before the next attempt: after the first refusal, and at most
	times       int           // refusals in a row
}

func (m *Member) refusals() refusals {
	return refusals{member: m.cfg.Name, first: m.cfg.firstRetry(), last: m.cfg.lastRetry()}
}

// add notes a refusal, logs it ever less often, and returns how long to wait until the next attempt: twice as long
// after each.
func (r *refusals) add(key string, err error) time.Duration {
	r.times++
	if repeats.Due(r.times) {
		slog.Warn("elastic: the store refuses a write, which is repeated",
			"member", r.member, "key", key, "err", err, "times", r.times)
	}
	return min(r.first<<min(r.times-1, 10), r.last)
}

// explain says why the store does not have what a member says.
func explain(text string, refusal error) string {
	if refusal == nil {
		return text
	}
	return fmt.Sprintf("%s: %v", text, refusal)
}

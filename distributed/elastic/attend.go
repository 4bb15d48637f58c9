package elastic

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/repeats"
)

// version is the version of what members say to each other, and precedes their terms.
const version = "elastic-5"

// Keys of the store.
const (
	keys       = "elastic/"
	epochKey   = keys + "epoch"
	finalKey   = keys + "final" // the World of the epoch with the last step
	termsKey   = keys + "terms"
	runKey     = keys + "run"     // names the job in flight records
	memberKeys = keys + "member/" // by name, leased
	deniedKeys = keys + "denied/" // by name, leased: why a process cannot be a member
)

func (m *Member) key() string { return memberKeys + m.cfg.Name }

// attend keeps this member in the store until Close, and connects again when the session is lost.
func (m *Member) attend() {
	for m.ctx.Err() == nil {
		err := m.serve()
		if errors.Is(err, comm.ErrMismatch) || errors.Is(err, ErrIdentity) {
			m.change(func() { m.fault = err })
			return
		}
		if err == nil {
			m.failures = 0
			continue
		}
		if m.ctx.Err() != nil {
			return
		}
		m.failures++
		if repeats.Due(m.failures) {
			slog.Warn("elastic: looking for the store", "member", m.cfg.Name, "err", err, "times", m.failures)
		}
		m.change(func() { m.refusal = err })
		m.pause(m.cfg.firstRetry())
	}
}

// serve is a session of the store, until it is lost or the member ends. The error is why there was none.
func (m *Member) serve() error {
	kv, err := m.cfg.Dial(m.ctx)
	if err != nil {
		return err
	}
	err = m.register(kv)
	if err == nil {
		m.keep(kv)
		if m.ctx.Err() != nil {
			kv.Drop(m.key())
		}
	}
	m.change(func() { m.kv = nil })
	if err := kv.Close(); err != nil {
		slog.Info("elastic: the entry of this member stays in the store until its lease ends",
			"member", m.cfg.Name, "err", err)
	}
	return err
}

// pause waits, until Close at most.
func (m *Member) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-m.ctx.Done():
	}
}

// register makes this member known in the store.
func (m *Member) register(kv store.Store) error {
	ctx, cancel := context.WithTimeout(m.ctx, m.cfg.limit)
	defer cancel()
	terms := version + " " + m.cfg.Terms
	writes := &retryStore{kv, m.refusals}
	first, ok, err := writes.CompareAndSet(ctx, termsKey, 0, []byte(terms))
	if err != nil {
		return err
	}
	if !ok && string(first.Value) != terms {
		words, firstWords := differ(terms, string(first.Value))
		err := fmt.Errorf("%w: the terms of %s have %q, those of the others %q",
			comm.ErrMismatch, m.cfg.Name, words, firstWords)
		_ = writes.Set(ctx, deniedKeys+m.cfg.Name, []byte(err.Error()), store.Lease) // the others only log it
		return err
	}
	beginning, _ := json.Marshal(record{}) // of a job, perhaps
	if _, _, err := writes.CompareAndSet(ctx, epochKey, 0, beginning); err != nil {
		return err
	}
	if err := m.nameRun(ctx, writes); err != nil {
		return err
	}
	m.change(func() {
		m.entries = map[string]entry{}
		m.session = time.Now()
		m.status.Session = rand.Text()
		for _, c := range m.claims() {
			c.forget()
		}
	})
	m.publish()
	if _, err := kv.Watch(ctx, keys, m.hear); err != nil {
		return err
	}
	return m.enroll(kv)
}

// nameRun has the flight records of all members name one run, so that those of earlier jobs are left out, where no
// launcher names it. The first member makes the name.
func (m *Member) nameRun(ctx context.Context, kv store.Store) error {
	now, _, err := kv.CompareAndSet(ctx, runKey, 0, []byte(cmp.Or(m.runName, rand.Text())))
	if err != nil || checkText(string(now.Value)) != nil { // no member writes such a name
		return err
	}
	m.runName = string(now.Value)
	dump.Agree(m.runName)
	return nil
}

// enroll makes this member's entry in a store, whose events come. An entry of its name is another process's, or this
// one's of a session that has not ended yet: then it names that session.
func (m *Member) enroll(kv store.Store) error {
	conflictTime := m.cfg.conflict(kv)
	ctx, cancel := context.WithTimeout(m.ctx, conflictTime+m.cfg.limit)
	defer cancel()
	refused := m.refusals()
	var conflict <-chan time.Time // nil while no other process has the name
	for {
		m.mu.Lock()
		c := m.statusClaim
		changed := m.changed
		free := c.stored == "" || incarnation(c.stored) == m.status.Incarnation
		m.mu.Unlock()
		var retry <-chan time.Time // nil unless a write was refused
		switch {
		case !c.due():
			m.change(func() {
				m.kv = kv
				m.refusal = nil
				m.abortWithout() // whoever is gone since the last session
			})
			return nil
		case free:
			conflict = nil
			now, err := c.write(ctx, kv)
			if err == nil {
				m.change(func() { m.statusClaim.confirm(now) })
				continue
			}
			if ctx.Err() != nil || kv.Err() != nil {
				return err
			}
			retry = time.After(refused.add(c.key, err))
			changed = nil
		case conflict == nil:
			conflict = time.After(conflictTime)
		}
		select {
		case <-changed:
		case <-retry:
		case <-conflict:
			return fmt.Errorf("%w: %s", ErrIdentity, m.cfg.Name)
		case <-kv.Done():
			return kv.Err()
		case <-ctx.Done():
			return comm.ContextError(ctx)
		}
	}
}

// incarnation is the incarnation of the member whose status an entry has.
func incarnation(text string) string {
	var s status
	_ = json.Unmarshal([]byte(text), &s) // of whoever has written something else, ""
	return s.Incarnation
}

// differ returns two texts without the words with which both begin, and both end.
func differ(a, b string) (string, string) {
	x := strings.Fields(a)
	y := strings.Fields(b)
	for len(x) > 0 && len(y) > 0 && x[0] == y[0] {
		x, y = x[1:], y[1:]
	}
	for len(x) > 0 && len(y) > 0 && x[len(x)-1] == y[len(y)-1] {
		x, y = x[:len(x)-1], y[:len(y)-1]
	}
	return strings.Join(x, " "), strings.Join(y, " ")
}

// hear takes an event of the store.
func (m *Member) hear(e store.Event) {
	if strings.HasPrefix(e.Key, deniedKeys) {
		if !e.Deleted {
			m.sayDenial(e.Value)
		}
		return
	}
	m.change(func() {
		for _, c := range m.claims() {
			if c.key == e.Key {
				c.hear(e)
				m.wake()
			}
		}
		if e.Deleted {
			delete(m.entries, e.Key)
			m.abortWithout()
			return
		}
		value, err := read(e)
		if err != nil {
			m.ignore(e.Key, err)
		}
		m.entries[e.Key] = value
		if v, _ := m.look(); v.ending() { // before the first of them is gone
			m.ends = true
		}
	})
}

// sayDenial logs that a process was refused, ever less often.
func (m *Member) sayDenial(reason []byte) {
	if times, due := m.denials.Count(""); due {
		reason = reason[:min(len(reason), maxTextBytes)]
		slog.Warn("elastic: a process that is no member of this job was refused",
			"member", m.cfg.Name, "reason", printable.Text(string(reason)), "times", times)
	}
}

// ignore logs that an entry of the store is ignored, ever less often. mu is held.
func (m *Member) ignore(key string, err error) {
	m.ignored++
	if repeats.Due(m.ignored) {
		slog.Warn("elastic: ignoring what no member writes", "member", m.cfg.Name, "key", fmt.Sprintf("%.100s", key),
			"err", fmt.Sprintf("%.200v", err), "times", m.ignored)
	}
}

// entry is what the store has of a key. Nobody changes what it points to.
type entry struct {
	version uint64  // of the store, which grows with each change of the key
	record  *record // the epoch, nil of other keys
	status  *status // of a member, nil of other keys
	final   string  // the World of the last epoch, "" of other keys
}

// abortWithout aborts the epoch without those of its members that are not in the store, unless they are there soon:
// not every communicator notices that a peer is gone. mu is held.
func (m *Member) abortWithout() {
	e := m.epoch
	if e == nil || e.Comm == nil {
		return
	}
	session := m.session
	v, _ := m.look()
	for _, p := range e.record.Members {
		if v.has(p) {
			continue
		}
		time.AfterFunc(m.cfg.absence(), func() {
			m.mu.Lock()
			v, _ := m.look()
			lost := m.epoch == e && m.kv != nil && m.session.Equal(session) && !v.has(p)
			m.mu.Unlock()
			if lost {
				comm.AbortAll(e.Comm, fmt.Errorf("%w: %s is gone from the store", comm.ErrPeerFailed, printable.Text(p.Name)))
			}
		})
	}
}

// change makes a change that waits look at.
func (m *Member) change(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
	close(m.changed)
	m.changed = make(chan struct{})
}

// wait waits until a condition holds, which is looked at with mu held.
func (m *Member) wait(ctx context.Context, condition func() (bool, error)) error {
	for {
		m.mu.Lock()
		ok, err := condition()
		changed := m.changed
		m.mu.Unlock()
		if ok || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return comm.ContextError(ctx)
		case <-m.ctx.Done():
			return ErrLeft
		}
	}
}

// now is the member's status.
func (m *Member) now() status {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.status
}

// claims are the keys that this member writes. mu is held.
func (m *Member) claims() [2]*claim { return [2]*claim{&m.statusClaim, &m.endClaim} }

// look returns what the store has, and the version of the epoch in it. mu is held.
func (m *Member) look() (v view, version uint64) {
	v = view{min: m.cfg.Min, max: m.cfg.Max, limit: m.cfg.limit, final: m.entries[finalKey].final}
	if m.epoch != nil {
		v.entered = m.epoch.record
	}
	version = m.entries[epochKey].version // also of what is no record, which the next one replaces
	for _, key := range slices.Sorted(maps.Keys(m.entries)) {
		switch e := m.entries[key]; {
		case e.record != nil:
			v.record = e.record
		case e.status != nil:
			v.present = append(v.present, *e.status)
		}
	}
	return v, version
}

package elastic

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/printable"
)

// A member that hangs lives: it keeps its entry in the store, and its connections answer. So do those that compute. The
// others judge it by themselves: it hangs if it has been missing for Config.Patience where all of them wait. A member
// whose wait in an exchange lasts says so in its status. Then it calls the roll: who of the epoch neither waits nor is
// at a boundary? If the same members are missing for long enough, it aborts the epoch, and the next one begins without
// them.

// rollCall is for how long the same members are missing where this one waits.
type rollCall struct {
	missing []person  // at the last look, empty if all were here
	start   time.Time // when these were found to be the missing ones
}

// look returns for how long exactly these members have been missing. A member that comes begins the time anew: until
// then the others have not waited for the missing ones alone.
func (r *rollCall) look(missing []person, now time.Time) time.Duration {
	if len(missing) == 0 || !slices.Equal(missing, r.missing) {
		r.missing = missing
		r.start = now
	}
	return now.Sub(r.start)
}

// missing returns the members of an epoch that are in the store and not at the boundary behind it.
func (v *view) missing(r *record) (list []person) {
	for i := range v.present {
		s := &v.present[i]
		if rank := r.rank(s.person()); rank >= 0 && !s.returned(r) {
			list = append(list, r.Members[rank])
		}
	}
	return list
}

// waiting reports whether a member of an epoch waits in an exchange of it.
func (v *view) waiting(r *record, p person) bool {
	return slices.ContainsFunc(v.present, func(s status) bool {
		return s.person().matches(p) && s.Awaits == r.World
	})
}

// absent returns the members of an epoch that are in the store, and neither wait in an exchange of it nor at the
// boundary behind it.
func (v *view) absent(r *record) []person {
	return slices.DeleteFunc(v.missing(r), func(p person) bool { return v.waiting(r, p) })
}

// attended is a communicator of an epoch, or a sub-communicator of it, whose waits the others are told of.
type attended struct {
	comm.Methods
	comm.Waits
	comm.Wrapped
	member *Member // whose waits they are
	record *record // the epoch
}

// attendWaits returns a communicator around c, of an epoch.
func (m *Member) attendWaits(c comm.Communicator, r *record) comm.Communicator {
	a := &attended{Wrapped: comm.Wrap(c), member: m, record: r}
	a.Methods = comm.Methods{
		Do:       func(call comm.Call) error { return call.Make(c) },
		Together: func(calls []comm.Call) error { return c.Group(calls...) },
	}
	a.Waits = comm.Waits{Wait: a.wait}
	return a
}

func (a *attended) wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	if len(a.record.Members) == 1 {
		return w.Make(ctx, a.Communicator)
	}
	l := &longWait{member: a.member, record: a.record, done: make(chan struct{})}
	timer := time.AfterFunc(a.member.cfg.tell(), l.tell)
	child, err := w.Make(ctx, a.Communicator)
	timer.Stop()
	l.end()
	if err != nil || child == nil {
		return nil, err
	}
	return a.member.attendWaits(child, a.record), nil
}

// longWait is a wait in an exchange, of which the others are told if it lasts.
type longWait struct {
	member *Member       // which waits
	record *record       // the epoch
	done   chan struct{} // closed when the wait is over
	state  waitState     // guarded by the member's mu
}

// waitState is how far a wait has come.
type waitState int

const (
	waitBrief waitState = iota // it has not lasted for Config.tell
	waitTold                   // the others know of it, or are to
	waitEnded                  // it is over
)

// tell tells the others that this member waits, and calls the roll until the wait is over.
func (w *longWait) tell() {
	m := w.member
	lasts := false
	m.change(func() {
		lasts = w.state == waitBrief
		if lasts {
			w.state = waitTold
			m.longWaits++
			m.status.Awaits = w.record.World
		}
	})
	if lasts {
		m.publish()
		w.callRoll()
	}
}

// end is the end of the wait.
func (w *longWait) end() {
	close(w.done)
	m := w.member
	m.mu.Lock()
	known := w.state == waitTold
	w.state = waitEnded
	if known {
		m.longWaits--
	}
	last := known && m.longWaits == 0
	if last {
		m.status.Awaits = ""
	}
	m.mu.Unlock()
	if last {
		m.publish()
	}
}

// callRoll aborts the epoch when members of it hang, and says ever less often who is missing.
func (w *longWait) callRoll() {
	m := w.member
	var roll rollCall
	began := time.Now()
	logAfter := m.cfg.Silence
	for {
		m.mu.Lock()
		v, _ := m.look()
		reached := m.kv != nil
		changed := m.changed
		m.mu.Unlock()
		now := time.Now()
		absent := v.absent(w.record)
		if !reached {
			roll = rollCall{} // nobody is seen to come
		} else if roll.look(absent, now) > m.cfg.Patience-m.cfg.tell() && v.spares(absent) {
			m.abortLate(w.record, absent)
			return
		}
		if waited := now.Sub(began); waited > logAfter && len(absent) > 0 {
			logAfter *= 2
			slog.Info("elastic: an exchange waits for members", "member", m.cfg.Name, "missing", printed(absent),
				"waited", (waited + m.cfg.tell()).Round(time.Second/10))
		}
		select {
		case <-changed:
		case <-time.After(m.cfg.glance()):
		case <-w.done:
			return
		case <-m.ctx.Done():
			return
		}
	}
}

// spares reports whether there are enough members without some of those that are here.
func (v *view) spares(list []person) bool { return len(v.present)-len(list) >= max(v.min, 1) }

// abortLate aborts an epoch because of members that hang.
func (m *Member) abortLate(r *record, late []person) {
	m.mu.Lock()
	e := m.epoch
	if e == nil || e.record != r || e.Comm == nil {
		m.mu.Unlock()
		return
	}
	m.late = late
	m.mu.Unlock()
	comm.AbortAll(e.Comm, fmt.Errorf("%w: %s has not come to an exchange within %v after the others",
		comm.ErrPeerFailed, printed(late), m.cfg.Patience))
}

// printed are the names of members, for logs.
func printed(list []person) string {
	var names []string
	for _, p := range list {
		names = append(names, printable.Text(p.Name))
	}
	return strings.Join(names, ", ")
}

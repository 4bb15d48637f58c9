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

// Next returns the epoch of the next step. It is a new one if the last vote found joining or leaving members, or if
// failed, the error of the step, is not nil. A new epoch has a new communicator, to which the trainer is bound, and a
// joining member has its state.
//
// Next waits for others as long as ctx allows and the number of members requires. Its errors are:
//
//   - [ErrLeft] after [Member.Leave],
//   - [ErrStore] when the store has been out of reach for five times Config.Silence,
//   - [ErrEnded] when the others have made the last step,
//   - those of [Join] if the store is reached only now,
//   - the last epoch's error when none could begin for five times Config.Silence.
//
// After an error Next may be called again, and the member joins when it can.
func (m *Member) Next(ctx context.Context, failed error) (*Epoch, error) {
	m.caller = ctx
	// An epoch that is not bound is one that Commit has formed to make the failed step again in.
	if failed != nil && m.epoch != nil && m.epoch.bound {
		m.fail(failed)
	}
	var failing time.Time // since then no epoch could begin, zero before that
	for attempt := 0; ; attempt++ {
		e := m.epoch
		sound := e != nil && e.Comm != nil && e.Comm.Err() == nil // otherwise it is broken, perhaps by another member
		if sound && e.bound && !e.changes {
			return e, nil
		}
		if !sound || e.bound { // otherwise Commit has formed it
			if err := m.form(ctx, m.finish(ctx, sound)); err != nil {
				return nil, fmt.Errorf("elastic: %s: %w", m.cfg.Name, err)
			}
			e = m.epoch
		}
		err := m.bind(ctx, e)
		if err == nil {
			return e, nil
		}
		m.fail(err)
		if failing.IsZero() {
			failing = time.Now()
		}
		if !lost(err) || ctx.Err() != nil || time.Since(failing) > m.cfg.limit {
			return nil, fmt.Errorf("elastic: %s: %w", m.cfg.Name, err)
		}
		slog.Warn("elastic: an epoch failed before its first step", "member", m.cfg.Name, "epoch", e.Number, "err", err)
		m.pause(min(time.Millisecond<<min(attempt, 20), m.cfg.firstRetry()))
	}
}

// finish ends the epoch, with a residual handed over if a sound one has members that leave, and returns how this
// member stands behind it.
func (m *Member) finish(ctx context.Context, sound bool) standing {
	e := m.epoch
	if e == nil || e.Comm == nil {
		return boundary
	}
	err := e.Comm.Err()
	if sound {
		err = m.handOver(ctx)
	}
	m.fail(err)
	if slices.Contains(e.leaves, e.Comm.Rank()) {
		return leaving
	}
	return boundary
}

// fail closes the communicator of the epoch, because of an error or because another one takes its place.
func (m *Member) fail(cause error) {
	if m.epoch != nil && m.epoch.Comm != nil {
		_ = comm.CloseAll(m.epoch.Comm, cause)
	}
}

// Commit votes that this member can commit its step, and returns nil if all members do. All members call it after the
// exchange of a step, for which it waits, and before anything that cannot be rolled back. An error means that the step
// is rolled back and repeated. If a member was lost, [Member.Next] returns the epoch in which to repeat it.
func (m *Member) Commit(ctx context.Context) error {
	e := m.epoch
	if e == nil {
		return fmt.Errorf("elastic: %w: Commit without an epoch", comm.ErrArgument)
	}
	if !e.bound { // an earlier vote of this step has ended its epoch
		return fmt.Errorf("elastic: %s: %w", m.cfg.Name, comm.ErrClosed)
	}
	if err := e.Comm.Sync(ctx); err != nil { // without the result of the exchange
		return fmt.Errorf("elastic: %s: %w", m.cfg.Name, err)
	}
	b, err := m.vote(ctx, e)
	if err == nil {
		return m.count(ctx, e, b)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("elastic: %s: %w", m.cfg.Name, err)
	}
	m.fail(err)
	step := m.Steps()
	if err := m.form(ctx, prepared); err != nil {
		if m.Steps() > step {
			return nil // the job has ended with this step, which Next says
		}
		return fmt.Errorf("elastic: %s: %w: %w", m.cfg.Name, comm.ErrPeerFailed, err)
	}
	if m.now().Standing.stateless() || m.Steps() == step {
		return fmt.Errorf("elastic: %s: step %d is made again: %w", m.cfg.Name, step+1, err)
	}
	return nil
}

// ballot is what a member votes, or the maximum of what all vote: words of an allreduce. The first one is 1 if a
// member comes or goes.
type ballot []int64

// leaves has a 1 for each member that leaves, by rank.
func (b ballot) leaves() []int64 { return b[1 : 1+len(b)/2] }

// hashes has the hash of each member's state, by rank, 0 after the first vote of an epoch.
func (b ballot) hashes() []int64 { return b[1+len(b)/2:] }

// vote gathers the votes of all members.
func (m *Member) vote(ctx context.Context, e *Epoch) (ballot, error) {
	b := make(ballot, 1+2*len(e.Members))
	rank := e.Comm.Rank()
	b.hashes()[rank] = e.hash
	m.mu.Lock()
	v, _ := m.look()
	if m.status.Wishes {
		b[0] = 1
		b.leaves()[rank] = 1
	} else if v.comes(e.record) {
		b[0] = 1
	}
	m.mu.Unlock()
	err := communicate(ctx, m, e, b, func(t *runtime.Tensor) error {
		return distributed.AllReduce(ctx, e.Comm, t, comm.Max)
	})
	return b, err
}

// count commits a step by the votes of all members, unless these show that their states differ.
func (m *Member) count(ctx context.Context, e *Epoch, b ballot) error {
	if err := e.agree(b.hashes()); err != nil {
		_ = e.Comm.Barrier(ctx) // all have the vote, before any of them goes
		return err
	}
	e.changes = b[0] != 0
	e.leaves = nil
	for rank, leaves := range b.leaves() {
		if leaves != 0 {
			e.leaves = append(e.leaves, rank)
		}
	}
	e.hash = 0
	m.change(func() {
		m.status.Step++
		m.ends = len(e.leaves) == len(e.Members)
	})
	return nil
}

// form waits at the boundary, where this member stands as given, until the next epoch has a communicator. Then Steps
// says whether a step that was prepared is committed.
func (m *Member) form(ctx context.Context, s standing) error {
	step := m.Steps()
	for {
		switch self := m.now(); {
		case self.Standing.stateless():
			s = joining
		case self.Step > step: // it was prepared, and has committed
			s = boundary
		}
		r, err := m.await(ctx, s)
		if err != nil {
			return err
		}
		began := time.Now()
		c, err := m.establish(ctx, r)
		m.failure = err
		if err == nil {
			m.begin(r, c)
			return nil
		}
		if ctx.Err() != nil || m.ctx.Err() != nil || !repeatable(err) {
			return err
		}
		missing := interface{ MissingRanks() []int }(nil)
		if errors.As(err, &missing) && time.Since(began) >= m.cfg.late() {
			m.change(func() { m.status.Unreached = missing.MissingRanks() })
		}
		slog.Warn("elastic: an epoch could not be formed", "member", m.cfg.Name, "epoch", r.Number, "err", err)
	}
}

// repeatable reports whether an attempt at an epoch that failed may be followed by another one.
func repeatable(err error) bool {
	if errors.Is(err, comm.ErrMismatch) {
		return false
	}
	return lost(err) || errors.Is(err, store.ErrRefused) // an address may belong to a later epoch
}

// begin has this member in an epoch that it has formed.
func (m *Member) begin(r *record, c comm.Communicator) {
	var names []string
	for _, p := range r.Members {
		names = append(names, p.Name)
	}
	m.formed = true
	joined := r.Members[c.Rank()].Fresh
	c = m.attendWaits(c, r)
	m.change(func() {
		m.epoch = &Epoch{Number: r.Number, Members: names, Comm: c, Joined: joined, record: r}
		m.ends = false
		m.status.Standing = stepping
		if joined {
			m.status.Standing = fresh
		}
		m.status.Formed = r.World
		m.status.Step = r.Step
		m.abortWithout()
	})
	m.publish()
}

// establish makes the communicator of an epoch. It stops when a member is gone, or at another boundary.
func (m *Member) establish(ctx context.Context, r *record) (c comm.Communicator, err error) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.limit)
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	m.mu.Lock()
	kv := m.kv
	session := m.session
	rank := r.rank(m.status.person())
	m.mu.Unlock()
	if kv == nil {
		return nil, fmt.Errorf("%w: the store is lost", comm.ErrPeerFailed)
	}
	go func() {
		if err := m.wait(ctx, func() (bool, error) {
			return false, m.obstacle(r, session)
		}); err != nil {
			stop(err)
		}
	}()
	place := Place{Rank: rank, Size: len(r.Members), World: r.World}
	c, err = m.cfg.Form(ctx, &retryStore{kv, m.refusals}, place)
	if err != nil && ctx.Err() != nil { // whatever Form makes of it
		return nil, fmt.Errorf("%w: %w: %w", comm.ErrPeerFailed, context.Cause(ctx), err)
	}
	if err != nil {
		return nil, err
	}
	if c.Rank() != place.Rank || c.WorldSize() != place.Size {
		err := fmt.Errorf("%w: Form made rank %d of %d, want %d of %d",
			comm.ErrArgument, c.Rank(), c.WorldSize(), place.Rank, place.Size)
		return nil, errors.Join(err, c.Close())
	}
	examined, err := instrument.Epoch(m.caller, m.cfg.Runtime, c, r.Number, m.cfg.Name)
	if err != nil {
		return nil, errors.Join(err, comm.CloseAll(c, err))
	}
	if err := examined.Barrier(ctx); err != nil {
		_ = comm.CloseAll(examined, err)
		return nil, fmt.Errorf("%w: %w", comm.ErrPeerFailed, err)
	}
	return examined, nil
}

// obstacle returns why an epoch will not be formed, as a session of the store says that began then. mu is held.
func (m *Member) obstacle(r *record, session time.Time) error {
	if m.kv == nil || !m.session.Equal(session) {
		return nil // it may need no store any more
	}
	var gone []string
	v, _ := m.look()
	for _, p := range r.Members {
		i := slices.IndexFunc(v.present, func(s status) bool { return s.person().matches(p) })
		if i < 0 || v.present[i].returned(r) && p.Name != m.cfg.Name {
			gone = append(gone, printable.Text(p.Name))
		}
	}
	if len(gone) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", comm.ErrPeerFailed, strings.Join(gone, ", "))
}

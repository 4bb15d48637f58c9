package outer

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"hash/crc64"
	"hash/fnv"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/runtime"
)

// stateMagic is the beginning of what [Loop.State] returns; its last byte is the version.
// Behind it come a saved, and a CRC-32C.
const stateMagic = "tutti-outer\x02"

// saved is a state. Arrays are bits of F32.
type saved struct {
	Fingerprint      uint64
	Shared           bool // of SharedState: whoever restores it has no parameters of its own
	At               position
	Fragments        []savedFragment
	Common, Velocity []byte
}

type savedFragment struct {
	Phase             phase
	Sent              moment
	Reduction, Deltas []byte // Deltas that have landed
}

// fingerprint is a hash of the configuration and of which parameters fragments have.
func (l *Loop) fingerprint() uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%v %v %d %d", l.cfg.Momentum, l.cfg.Nesterov, l.cfg.Fragments, l.cfg.Delay)
	for _, f := range l.fragments {
		for i, p := range f.params {
			fmt.Fprintf(h, " %v %v", p.DType(), f.deltas[i].Shape())
		}
	}
	return h.Sum64()
}

// read returns the bits of elements, for which it waits.
func (l *Loop) read(ctx context.Context, p uintptr, n int) ([]byte, error) {
	bits := make([]byte, n*base.WordSize)
	err := l.order.HostAfterCompute(ctx)
	if err == nil {
		err = l.rt.CopyOut(bits, p)
	}
	return bits, err
}

// State returns what a loop of the same parameters and configuration needs to go on from here,
// bit for bit, beside the rank's parameters, which the program saves: the common parameters,
// the outer optimizer's velocity, averages that have not arrived, and residuals. Every rank
// saves its own. It waits for an exchange in flight until ctx is done, so all ranks call it
// after the same step.
func (l *Loop) State(ctx context.Context) ([]byte, error) {
	return l.state(ctx, false)
}

// SharedState is [ddp.Gradients.SharedState] of a loop: for a rank that joins, after [Loop.Rebind]. The rank restores it, and has the
// common parameters then. It takes part in an average that is to be repeated with an outer gradient of zeros.
func (l *Loop) SharedState(ctx context.Context) ([]byte, error) {
	return l.state(ctx, true)
}

func (l *Loop) state(ctx context.Context, shared bool) ([]byte, error) {
	s := saved{Fingerprint: l.fingerprint(), Shared: shared, At: l.at, Fragments: make([]savedFragment, len(l.fragments))}
	state := bytes.NewBufferString(stateMagic)
	err := l.do("outer state", func() (err error) {
		for i, f := range l.fragments {
			part := &s.Fragments[i]
			if shared {
				part.Reduction, err = f.sync.SharedState(ctx)
			} else if err = l.land(ctx, f); err == nil {
				part.Reduction, err = f.sync.State(ctx)
			}
			if part.Phase, part.Sent = f.phase, f.sent; shared {
				part.Sent.Made = l.at.Now.Made // a rank that joins has made no step
			}
			if err == nil && f.phase == landed {
				part.Deltas, err = l.read(ctx, at(l.delta, f), f.n)
			}
			if err != nil {
				return err
			}
		}
		if s.Common, err = l.read(ctx, l.common.Ptr, l.n); err == nil && l.velocity.Ptr != 0 {
			s.Velocity, err = l.read(ctx, l.velocity.Ptr, l.n)
		}
		return errors.Join(err, gob.NewEncoder(state).Encode(s))
	})
	if err != nil {
		return nil, err
	}
	return base.Seal(state.Bytes()), nil
}

// Restore makes l what it was when [Loop.State] returned its state, between two steps; the
// program restores the rank's parameters of that step, or calls [Loop.Adopt]. With the state of
// [Loop.SharedState] the rank's parameters become the common ones. With another
// number of ranks than before a rank passes the states that [sparse.RestoreRanks] names. A
// wrong state is found before anything but residuals has changed; errors are those of
// [ddp.Gradients.Restore].
func (l *Loop) Restore(ctx context.Context, states ...[]byte) error {
	return l.do("outer restore", func() error { return l.restore(ctx, states) })
}

// check returns why a state is none of this loop.
func (l *Loop) check(s *saved) error {
	if s.Fingerprint != l.fingerprint() {
		return fmt.Errorf("%w: it is of other parameters, or of other Momentum, Fragments or Delay", comm.ErrMismatch)
	}
	damaged := fmt.Errorf("%w: the state is damaged", comm.ErrArgument)
	bytes := l.n * base.WordSize
	velocity := bytes
	if l.velocity.Ptr == 0 {
		velocity = 0
	}
	at := s.At
	counts := []int{at.Now.Step, at.Round, at.First, at.Length}
	if len(s.Fragments) != len(l.fragments) || len(s.Common) != bytes || len(s.Velocity) != velocity {
		return damaged
	}
	if slices.Min(counts) < 0 || !at.Now.valid() {
		return damaged
	}
	for i, f := range l.fragments {
		saved := s.Fragments[i]
		deltas := 0
		if saved.Phase == landed {
			deltas = f.n * base.WordSize
		}
		if saved.Phase > skipped || saved.Phase == inFlight || len(saved.Deltas) != deltas || !saved.Sent.valid() {
			return damaged
		}
	}
	return nil
}

// valid reports whether a loop can be there.
func (m moment) valid() bool { return m.Step >= 0 && m.Made >= 0 && !math.IsInf(m.Made, 1) }

func (l *Loop) restore(ctx context.Context, states [][]byte) error {
	if len(states) == 0 {
		return fmt.Errorf("%w: no state", comm.ErrArgument)
	}
	all, parts := make([]saved, len(states)), make([][][]byte, len(l.fragments))
	for i, state := range states {
		s := &all[i]
		body, err := base.Unseal(state, stateMagic, "an outer loop")
		if err == nil {
			err = gob.NewDecoder(bytes.NewReader(body)).Decode(s)
		}
		if err == nil {
			err = l.check(s)
		}
		switch first := all[0].At; {
		case err != nil:
		case s.At.Now.Step != first.Now.Step || s.At.Round != first.Round:
			err = fmt.Errorf("%w: it is of step %d, the first of %d", comm.ErrMismatch, s.At.Now.Step, first.Now.Step)
		}
		if err != nil {
			return fmt.Errorf("state %d: %w", i, err)
		}
		for f := range parts {
			parts[f] = append(parts[f], s.Fragments[f].Reduction)
		}
	}
	for i, f := range l.fragments {
		if f.phase == inFlight {
			_ = l.land(ctx, f) // which is dropped
		}
		if err := f.sync.Restore(ctx, parts[i]...); err != nil {
			return fmt.Errorf("fragment %d: %w", i, err)
		}
	}
	first := all[0]
	errs := []error{l.rt.CopyIn(l.common.Ptr, first.Common), l.rt.CopyIn(l.velocity.Ptr, first.Velocity)}
	for i, f := range l.fragments {
		from := first.Fragments[i]
		f.phase, f.sent, f.weight, f.over = from.Phase, from.Sent, 0, 0
		if f.phase == own {
			from.Deltas = make([]byte, f.n*base.WordSize)
		}
		errs = append(errs, l.rt.CopyIn(at(l.delta, f), from.Deltas))
	}
	if first.Shared {
		for _, f := range l.fragments {
			errs = append(errs, l.adopt(f, false))
		}
	}
	l.at, l.agreed = first.At, false
	l.stats = Stats{FirstStep: first.At.Now.Step, FirstRound: first.At.Round}
	return errors.Join(errs...)
}

// BeforeCommit is [ddp.Gradients.BeforeCommit]: f is called in each exchange.
func (l *Loop) BeforeCommit(f func(ctx context.Context) error) {
	for _, fragment := range l.fragments {
		fragment.sync.BeforeCommit(f)
	}
}

// Residuals is [ddp.Gradients.Residuals] of all fragments, after it has waited for exchanges in flight.
func (l *Loop) Residuals() (all []*runtime.Tensor, err error) {
	for _, f := range l.fragments {
		if f.phase == inFlight {
			err = errors.Join(err, l.land(context.Background(), f))
		}
		list, failed := f.sync.Residuals()
		all, err = append(all, list...), errors.Join(err, failed)
	}
	return all, err
}

// Rebind moves the loop to another communicator, in the middle of a window too: all ranks of c
// do it together. What lost ranks had not sent is lost. A fragment whose exchange failed is
// averaged again over the ranks of c, when Step is repeated.
//
// While a fragment is in flight over a communicator that is sound, Rebind is [comm.ErrArgument] at once, and changes nothing: a
// peer may never send it. Call [Loop.State] before, which waits for the exchange, or [comm.AbortAll] for the communicator given to New.
// Where c fails before the loop is bound to it, the loop can be moved to another one.
//
// The exchange has to have failed on all ranks of c or on none, as it does where
// [Loop.BeforeCommit] votes. Otherwise the next exchange or arrival is [comm.ErrMismatch] on
// all of them, and they go on from saved states.
func (l *Loop) Rebind(ctx context.Context, c comm.Communicator) error {
	return l.do("outer rebind", func() error {
		if err := base.Reaches(l.rt, c); err != nil {
			return err
		}
		for i, f := range l.fragments {
			if f.phase == inFlight && l.c.Err() == nil {
				return fmt.Errorf("%w: fragment %d is in flight: call State, or abort the communicator (comm.AbortAll)", comm.ErrArgument, i)
			}
		}
		for _, f := range l.fragments {
			if f.phase == inFlight {
				_ = l.land(ctx, f) // or it has failed, and is to be averaged again
			}
			if f.phase == own && f.sent.Step == l.at.Now.Step+1 { // by the step that is repeated, which sends it, as on ranks that have not
				f.phase, f.sent = resting, f.before
			}
		}
		if l.own {
			_ = l.c.Close() // of a world that is over
		}
		if err := l.bind(ctx, c); err != nil {
			return err
		}
		for _, f := range l.fragments {
			if l.err == nil {
				l.err = f.sync.Rebind(ctx, l.c)
			}
		}
		return l.err
	})
}

var crcTable = crc64.MakeTable(crc64.ECMA)

// Hash returns the CRC-64 (ECMA-182) of the common parameters' bits, little-endian F32, for the comparison of
// ranks and runs. It waits for the device until ctx is done.
func (l *Loop) Hash(ctx context.Context) (uint64, error) {
	var bits []byte
	err := l.do("outer hash", func() (err error) {
		bits, err = l.read(ctx, l.common.Ptr, l.n)
		return err
	})
	return crc64.Checksum(bits, crcTable), err
}

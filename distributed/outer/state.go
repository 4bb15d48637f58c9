package outer

import (
	"context"
	"errors"
	"fmt"
	"hash/crc64"
	"hash/fnv"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/distributed/internal/state"
	"github.com/tutti-go/tutti/runtime"
)

// kind marks the states of a Loop.
var kind = state.Kind{
	Name:    "tutti-outer",
	Version: 3,
	Owner:   "an outer loop",
}

// savedLoop has the fields of a state, in their order.
type savedLoop struct {
	fingerprint      uint64          // of the parameters and options that a state is for
	shared           bool            // the rank that restores it has no parameters
	position         position        // between two steps
	fragments        []savedFragment // in order
	common, velocity []byte          // F32
}

// savedFragment is a fragment's part of a state.
type savedFragment struct {
	phase     phase  // between two exchanges
	sent      moment // when it was sent last
	reduction []byte // the state of its Gradients
	deltas    []byte // F32, that have landed; empty in other phases
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

// State returns the state from which a loop of the same parameters and configuration continues, bit for bit: the common
// parameters, the outer optimizer's velocity, averages that have not arrived, and residuals. The program saves the
// rank's parameters. Every rank saves its own state. State waits for an exchange in flight until ctx is done, so all
// ranks call it after the same step.
func (l *Loop) State(ctx context.Context) ([]byte, error) {
	return l.state(ctx, false)
}

// SharedState is [ddp.Gradients.SharedState] of a loop, for a joining rank, after [Loop.Rebind]. The rank restores it,
// and then has the common parameters. To an average that is repeated, it contributes an outer gradient of zeros.
func (l *Loop) SharedState(ctx context.Context) ([]byte, error) {
	return l.state(ctx, true)
}

func (l *Loop) state(ctx context.Context, shared bool) (saved []byte, err error) {
	err = l.do("outer state", func() error {
		e := state.NewEncoder(kind, 0)
		e.Uint64(l.fingerprint())
		e.Bool(shared)
		encodePosition(e, l.position)
		e.Int(len(l.fragments))
		for _, f := range l.fragments {
			if err := l.saveFragment(ctx, e, f, shared); err != nil {
				return err
			}
		}
		if err := l.save(ctx, e, l.common.Ptr, l.n); err != nil {
			return err
		}
		velocity := l.n
		if l.velocity.Ptr == 0 {
			velocity = 0
		}
		if err := l.save(ctx, e, l.velocity.Ptr, velocity); err != nil {
			return err
		}
		saved = e.Seal()
		return nil
	})
	return saved, err
}

// saveFragment appends a fragment, whose exchange has landed then, unless that is what ranks share.
func (l *Loop) saveFragment(ctx context.Context, e *state.Encoder, f *fragment, shared bool) error {
	reduction, err := l.reduction(ctx, f, shared)
	if err != nil {
		return err
	}
	sent := f.sent
	if shared {
		sent.Made = l.position.Now.Made // a rank that joins has made no step
	}
	e.Uint8(uint8(f.phase))
	encodeMoment(e, sent)
	e.Bytes(reduction)
	deltas := 0
	if f.phase == landed {
		deltas = f.n
	}
	return l.save(ctx, e, address(l.delta, f), deltas)
}

// reduction returns the state of what reduces a fragment, whose exchange has landed then, or what ranks share of it.
func (l *Loop) reduction(ctx context.Context, f *fragment, shared bool) ([]byte, error) {
	if shared {
		return f.sync.SharedState(ctx)
	}
	if err := l.land(ctx, f); err != nil {
		return nil, err
	}
	return f.sync.State(ctx)
}

// save appends n elements at p.
func (l *Loop) save(ctx context.Context, e *state.Encoder, p uintptr, n int) error {
	bits := e.Extend(n * base.WordSize)
	if n == 0 {
		return nil
	}
	if err := l.order.HostAfterCompute(ctx); err != nil {
		return err
	}
	return l.rt.CopyOut(bits, p)
}

func encodeMoment(e *state.Encoder, m moment) {
	e.Int(m.Step)
	e.Float64(m.Made)
}

func decodeMoment(d *state.Decoder) moment {
	m := moment{Step: d.Int(math.MaxInt)}
	m.Made = d.Float64()
	if !(m.Made >= 0) || math.IsInf(m.Made, 1) {
		d.Damaged("%v steps were counted", m.Made)
	}
	return m
}

func encodePosition(e *state.Encoder, p position) {
	encodeMoment(e, p.Now)
	e.Int(p.Round)
	e.Int(p.First)
	e.Int(p.Length)
}

func decodePosition(d *state.Decoder) position {
	p := position{Now: decodeMoment(d)}
	p.Round = d.Int(math.MaxInt)
	p.First = d.Int(math.MaxInt)
	p.Length = d.Int(math.MaxInt)
	return p
}

// valid reports whether a position is one in its window, and the window one that a loop may have.
func (p *position) valid(c *Config) bool {
	passed := p.Now.Step - p.First
	return c.fits(p.Length) && p.First <= math.MaxInt-p.Length && passed >= 0 && passed < p.Length
}

// Restore returns l, between two steps, to the state that [Loop.State] returned. The program restores the rank's
// parameters of that step, or calls [Loop.Adopt]. With the state of [Loop.SharedState] the rank's parameters become the
// common ones. If the number of ranks has changed, a rank passes the states that [sparse.RestoreRanks] names. A wrong
// state is detected before anything but residuals has changed. Errors are those of [ddp.Gradients.Restore].
func (l *Loop) Restore(ctx context.Context, states ...[]byte) error {
	return l.do("outer restore", func() error { return l.restore(ctx, states) })
}

// parse checks a state, but for those of its fragments' reductions.
func (l *Loop) parse(bytes []byte) (savedLoop, error) {
	d := state.NewDecoder(kind, bytes)
	s := savedLoop{fingerprint: d.Uint64()}
	if d.Err() == nil && s.fingerprint != l.fingerprint() {
		d.Fail(fmt.Errorf("%w: it is of other parameters, or of other Momentum, Fragments or Delay", comm.ErrMismatch))
	}
	s.shared = d.Bool()
	s.position = decodePosition(d)
	if d.Err() == nil && !s.position.valid(&l.cfg) {
		d.Damaged("step %d in a window of %d steps from step %d", s.position.Now.Step, s.position.Length, s.position.First)
	}
	fragments := d.Int(math.MaxInt)
	if fragments != len(l.fragments) {
		d.Damaged("%d fragments, want %d", fragments, len(l.fragments))
	}
	for _, f := range l.fragments {
		s.fragments = append(s.fragments, f.parse(d))
	}
	s.common = d.Bytes()
	s.velocity = d.Bytes()
	size := l.n * base.WordSize
	velocity := size
	if l.velocity.Ptr == 0 {
		velocity = 0
	}
	if len(s.common) != size || len(s.velocity) != velocity {
		d.Damaged("%d bytes of parameters and %d of the velocity, want %d and %d",
			len(s.common), len(s.velocity), size, velocity)
	}
	return s, d.End()
}

// parse checks a fragment's part of a state.
func (f *fragment) parse(d *state.Decoder) savedFragment {
	s := savedFragment{phase: phase(d.Uint8())}
	s.sent = decodeMoment(d)
	s.reduction = d.Bytes()
	s.deltas = d.Bytes()
	deltas := 0
	if s.phase == landed {
		deltas = f.n * base.WordSize
	}
	if s.phase > skipped || s.phase == inFlight || len(s.deltas) != deltas {
		d.Damaged("a fragment in phase %d with %d bytes of deltas", uint8(s.phase), len(s.deltas))
	}
	return s
}

func (l *Loop) restore(ctx context.Context, states [][]byte) error {
	saved, err := l.parseAll(states)
	if err != nil {
		return err
	}
	for i, f := range l.fragments {
		if f.phase == inFlight {
			_ = l.land(ctx, f) // which is dropped
		}
		parts := make([][]byte, len(saved))
		for rank, s := range saved {
			parts[rank] = s.fragments[i].reduction
		}
		if err := f.sync.Restore(ctx, parts...); err != nil {
			return fmt.Errorf("fragment %d: %w", i, err)
		}
	}
	first := saved[0]
	errs := []error{l.rt.CopyIn(l.common.Ptr, first.common), l.rt.CopyIn(l.velocity.Ptr, first.velocity)}
	for i, f := range l.fragments {
		from := first.fragments[i]
		f.phase = from.phase
		f.sent = from.sent
		f.weight = 0
		f.divisor = 0
		deltas := from.deltas
		if f.phase == unaveraged {
			deltas = make([]byte, f.n*base.WordSize)
		}
		errs = append(errs, l.rt.CopyIn(address(l.delta, f), deltas))
	}
	if first.shared {
		for _, f := range l.fragments {
			errs = append(errs, l.adopt(f, false))
		}
	}
	l.position = first.position
	l.agreed = false
	l.stats = Stats{FirstStep: l.position.Now.Step, FirstRound: l.position.Round}
	return errors.Join(errs...)
}

// parseAll parses states, which are those of one step.
func (l *Loop) parseAll(states [][]byte) ([]savedLoop, error) {
	if len(states) == 0 {
		return nil, fmt.Errorf("%w: no state", comm.ErrArgument)
	}
	saved := make([]savedLoop, len(states))
	for i, bytes := range states {
		s, err := l.parse(bytes)
		if err != nil {
			return nil, fmt.Errorf("state %d: %w", i, err)
		}
		saved[i] = s
		step := s.position.Now.Step
		first := saved[0].position
		if step != first.Now.Step || s.position.Round != first.Round {
			return nil, fmt.Errorf("state %d: %w: it is of step %d, the first of %d", i, comm.ErrMismatch, step, first.Now.Step)
		}
	}
	return saved, nil
}

// BeforeCommit is [ddp.Gradients.BeforeCommit]: f is called in each exchange.
func (l *Loop) BeforeCommit(f func(ctx context.Context) error) {
	for _, fragment := range l.fragments {
		fragment.sync.BeforeCommit(f)
	}
}

// Residuals waits for exchanges in flight and returns [ddp.Gradients.Residuals] of all fragments.
func (l *Loop) Residuals() (all []*runtime.Tensor, err error) {
	for _, f := range l.fragments {
		if f.phase == inFlight {
			err = errors.Join(err, l.land(context.Background(), f))
		}
		list, failed := f.sync.Residuals()
		all = append(all, list...)
		err = errors.Join(err, failed)
	}
	return all, err
}

// Rebind moves the loop to another communicator, also in the middle of a window. All ranks of c call it together.
// Residuals of lost ranks are lost. A fragment whose exchange failed is averaged again over the ranks of c when Step is
// repeated.
//
// While a fragment is in flight over a working communicator, Rebind returns [comm.ErrArgument] at once and changes
// nothing: a peer may never send the fragment. First call [Loop.State], which waits for the exchange, or
// [comm.AbortAll] with the communicator passed to New. If c fails before the loop is bound to it, the loop can be moved
// to another one.
//
// The exchange must have failed on all ranks of c or on none, as it does if [Loop.BeforeCommit] votes. Otherwise the
// next exchange or arrival is [comm.ErrMismatch] on all of them, and they continue from saved states.
func (l *Loop) Rebind(ctx context.Context, c comm.Communicator) error {
	return l.do("outer rebind", func() error {
		if err := base.Reaches(l.rt, c); err != nil {
			return err
		}
		for i, f := range l.fragments {
			if f.phase == inFlight && l.c.Err() == nil {
				return fmt.Errorf("%w: fragment %d is in flight: call State, or abort the communicator (comm.AbortAll)",
					comm.ErrArgument, i)
			}
		}
		for _, f := range l.fragments {
			if f.phase == inFlight {
				_ = l.land(ctx, f) // or it has failed, and is to be averaged again
			}
			// It was sent by the step that is repeated, which sends it again, as on ranks that have not sent it.
			if f.phase == unaveraged && f.sent.Step == l.position.Now.Step+1 {
				f.phase = resting
				f.sent = f.before
			}
		}
		if l.ownsComm {
			_ = l.c.Close() // of a world that is over
		}
		if err := l.bind(ctx, c); err != nil {
			return err
		}
		for _, f := range l.fragments {
			l.err = f.sync.Rebind(ctx, l.c)
			if l.err != nil {
				return l.err
			}
		}
		return nil
	})
}

var crcTable = crc64.MakeTable(crc64.ECMA)

// Hash returns the CRC-64 (ECMA-182) of the common parameters' bits, little-endian F32, for the comparison of
// ranks and runs. It waits for the device until ctx is done.
func (l *Loop) Hash(ctx context.Context) (uint64, error) {
	bits := make([]byte, l.n*base.WordSize)
	err := l.do("outer hash", func() error {
		if err := l.order.HostAfterCompute(ctx); err != nil {
			return err
		}
		return l.rt.CopyOut(bits, l.common.Ptr)
	})
	return crc64.Checksum(bits, crcTable), err
}

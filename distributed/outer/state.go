package outer

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc64"
	"hash/fnv"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// stateMagic is the beginning of what [Loop.State] returns; its last byte is the version.
// Behind it come a stateHeader, a fragmentHeader and the state of the reduction of each
// fragment, then the arrays, and a CRC-32C.
const stateMagic = "tutti-outer\x01"

type stateHeader struct {
	Fingerprint                uint64
	Step, Round, Begin, Length int64
	Made                       float64
}

type fragmentHeader struct {
	Phase, Sent, Bytes int64
	Made               float64
}

// fingerprint is a hash of the configuration and of which parameters fragments have.
func (l *Loop) fingerprint() uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%v %v %d %d", l.cfg.Momentum, l.cfg.Nesterov, l.cfg.Fragments, l.cfg.Delay)
	for _, f := range l.fragments {
		for _, t := range f.params {
			fmt.Fprintf(h, " %v %v", t.DType(), t.Shape())
		}
	}
	return h.Sum64()
}

// arrays are those that a state has, by address and length in bytes: of velocity and delta, none
// where there is none, or nothing in them.
func (l *Loop) arrays() []base.Buffer {
	all := []base.Buffer{{Ptr: l.common.Ptr, Bytes: l.n * base.WordSize}}
	if l.velocity.Ptr != 0 {
		all = append(all, base.Buffer{Ptr: l.velocity.Ptr, Bytes: l.n * base.WordSize})
	}
	for _, f := range l.fragments {
		if f.phase == landed {
			all = append(all, base.Buffer{Ptr: at(l.delta, f), Bytes: f.n * base.WordSize})
		}
	}
	return all
}

// State returns what a loop of the same parameters and configuration needs to go on from here,
// bit for bit, beside the rank's parameters, which the program saves: the common parameters,
// the outer optimizer's velocity, averages that have not arrived, and residuals. Every rank
// saves its own. It waits for an exchange in flight until ctx is done, so all ranks call it
// after the same step.
func (l *Loop) State(ctx context.Context) ([]byte, error) {
	return l.state(ctx, l.land, (*ddp.Gradients).State)
}

// SharedState is [ddp.Gradients.SharedState] of a loop: for a rank that joins, after [Loop.Rebind]. The rank restores it, and calls
// [Loop.Adopt]. It takes part in an average that is to be repeated with an outer gradient of zeros.
func (l *Loop) SharedState(ctx context.Context) ([]byte, error) {
	return l.state(ctx, func(context.Context, *fragment) error { return nil }, (*ddp.Gradients).SharedState)
}

func (l *Loop) state(ctx context.Context, land func(context.Context, *fragment) error, of func(*ddp.Gradients, context.Context) ([]byte, error)) ([]byte, error) {
	const op = "outer state"
	if err := l.usable(op); err != nil {
		return nil, err
	}
	state, err := binary.Append([]byte(stateMagic), binary.LittleEndian,
		stateHeader{l.fingerprint(), int64(l.step), int64(l.round), int64(l.begin), int64(l.length), l.made})
	for _, f := range l.fragments {
		if err == nil {
			err = land(ctx, f)
		}
		var part []byte
		if err == nil {
			part, err = of(f.sync, ctx)
		}
		if err == nil {
			state, err = binary.Append(state, binary.LittleEndian, fragmentHeader{int64(f.phase), int64(f.sent), int64(len(part)), f.made})
			state = append(state, part...)
		}
	}
	if err == nil {
		err = l.order.HostAfterCompute(ctx)
	}
	for _, a := range l.arrays() {
		n := len(state)
		state = append(state, make([]byte, a.Bytes)...)
		if err == nil {
			err = l.rt.CopyOut(state[n:], a.Ptr)
		}
	}
	if err != nil {
		return nil, base.OpError(op, err)
	}
	return base.Seal(state), nil
}

// Restore makes l what it was when [Loop.State] returned its state, between two steps; the
// program restores the rank's parameters of that step, or calls [Loop.Adopt]. With another
// number of ranks than before a rank passes the states that [sparse.RestoreRanks] names. A
// wrong state is found before anything but residuals has changed; errors are those of
// [ddp.Gradients.Restore].
func (l *Loop) Restore(ctx context.Context, states ...[]byte) error {
	const op = "outer restore"
	if err := l.usable(op); err != nil {
		return err
	}
	if err := l.restore(ctx, states); err != nil {
		return base.OpError(op, err)
	}
	return nil
}

func (l *Loop) restore(ctx context.Context, states [][]byte) error {
	if len(states) == 0 {
		return fmt.Errorf("%w: no state", comm.ErrArgument)
	}
	all := make([]savedLoop, len(states))
	parts := make([][][]byte, len(l.fragments))
	for i, state := range states {
		var err error
		if all[i], err = l.parse(state); err == nil && (all[i].Step != all[0].Step || all[i].Round != all[0].Round) {
			err = fmt.Errorf("%w: it is of step %d, the first of %d", comm.ErrMismatch, all[i].Step, all[0].Step)
		}
		if err != nil {
			return fmt.Errorf("state %d: %w", i, err)
		}
		for f := range parts {
			parts[f] = append(parts[f], all[i].parts[f])
		}
	}
	first := all[0]
	for i, f := range l.fragments {
		if f.phase == inFlight {
			_ = l.land(ctx, f) // which is dropped
		}
		if err := f.sync.Restore(ctx, parts[i]...); err != nil {
			return fmt.Errorf("fragment %d: %w", i, err)
		}
		h := first.fragments[i]
		f.weight, f.mean = 0, 0
		if f.phase, f.sent, f.made = phase(h.Phase), int(h.Sent), h.Made; f.phase == failed {
			if err := l.rt.Fill(at(l.delta, f), f.n, dtype.F32, 0); err != nil {
				return err
			}
		}
	}
	for _, a := range l.arrays() {
		if err := l.rt.CopyIn(a.Ptr, first.arrays[:a.Bytes]); err != nil {
			return err
		}
		first.arrays = first.arrays[a.Bytes:]
	}
	l.step, l.round, l.begin, l.length = int(first.Step), int(first.Round), int(first.Begin), int(first.Length)
	l.made, l.agreed, l.stats = first.Made, false, Stats{}
	return nil
}

// savedLoop is a state that was parsed.
type savedLoop struct {
	stateHeader
	fragments []fragmentHeader
	parts     [][]byte // states of the fragments' reductions
	arrays    []byte
}

func (l *Loop) parse(state []byte) (p savedLoop, err error) {
	rest, err := base.Unseal(state, stateMagic, "an outer loop")
	if err != nil {
		return p, err
	}
	read := func(to any) {
		var n int
		if n, err = binary.Decode(rest, binary.LittleEndian, to); err == nil {
			rest = rest[n:]
		}
	}
	if read(&p.stateHeader); err == nil && p.Fingerprint != l.fingerprint() {
		return p, fmt.Errorf("%w: it is of other parameters, or of other Momentum, Fragments or Delay", comm.ErrMismatch)
	}
	want := l.n * base.WordSize
	if l.velocity.Ptr != 0 {
		want *= 2
	}
	for _, f := range l.fragments {
		var h fragmentHeader
		if err == nil {
			read(&h)
		}
		if err != nil || h.Bytes < 0 || h.Bytes > int64(len(rest)) || h.Phase < 0 || h.Phase > int64(skipped) {
			return p, fmt.Errorf("%w: the state is damaged", comm.ErrArgument)
		}
		if phase(h.Phase) == landed {
			want += f.n * base.WordSize
		}
		p.fragments, p.parts, rest = append(p.fragments, h), append(p.parts, rest[:h.Bytes]), rest[h.Bytes:]
	}
	if p.arrays = rest; len(rest) != want {
		return p, fmt.Errorf("%w: the state is damaged", comm.ErrArgument)
	}
	return p, nil
}

// BeforeCommit is [ddp.Gradients.BeforeCommit]: f is called in each exchange.
func (l *Loop) BeforeCommit(f func(ctx context.Context) error) {
	for _, fragment := range l.fragments {
		fragment.sync.BeforeCommit(f)
	}
}

// Residuals is [ddp.Gradients.Residuals] of all fragments.
func (l *Loop) Residuals() (all []*runtime.Tensor, err error) {
	for _, f := range l.fragments {
		list, err := f.sync.Residuals()
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}
	return all, nil
}

// Rebind moves the loop to another communicator, in the middle of a window too: all ranks of c
// do it together. What lost ranks had not sent is lost. A fragment whose exchange failed is
// averaged again over the ranks of c, when Step is repeated.
//
// The exchange has to have failed on all ranks of c or on none, as it does where
// [Loop.BeforeCommit] votes. Otherwise the next exchange or arrival is [comm.ErrMismatch] on
// all of them, and they go on from saved states.
func (l *Loop) Rebind(ctx context.Context, c comm.Communicator) error {
	const op = "outer rebind"
	if err := l.usable(op); err != nil {
		return err
	}
	if err := base.CheckComm(c); err != nil {
		return base.OpError(op, err)
	}
	for _, f := range l.fragments {
		if f.phase == inFlight {
			_ = l.land(ctx, f) // or it has failed, and is to be averaged again
		}
		if f.phase == failed && f.sent == l.step+1 { // by the step that is repeated, which sends it, as on ranks that have not
			f.phase, f.sent, f.made = resting, f.sentBefore, f.madeBefore
		}
	}
	if l.own {
		_ = l.c.Close() // of a world that is over
	}
	err := l.bind(ctx, c)
	for _, f := range l.fragments {
		if err == nil {
			err = f.sync.Rebind(ctx, l.c)
		}
	}
	if err != nil {
		l.err = err
		return base.OpError(op, err)
	}
	return nil
}

var crcTable = crc64.MakeTable(crc64.ECMA)

// Hash returns the CRC-64 (ECMA-182) of the common parameters' bits, little-endian F32, for the comparison of
// ranks and runs. It waits for the device until ctx is done.
func (l *Loop) Hash(ctx context.Context) (uint64, error) {
	const op = "outer hash"
	if err := l.usable(op); err != nil {
		return 0, err
	}
	bits := make([]byte, l.n*base.WordSize)
	err := l.order.HostAfterCompute(ctx)
	if err == nil {
		err = l.rt.CopyOut(bits, l.common.Ptr)
	}
	if err != nil {
		return 0, base.OpError(op, err)
	}
	return crc64.Checksum(bits, crcTable), nil
}

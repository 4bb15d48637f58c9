package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// stateMagic is the beginning of what State returns; its last byte is the
// version.
const stateMagic = "tutti-sparse\x05"

// stateHeader is what follows it, little-endian. Behind it come words numbers
// (I32), elements of the residual and the velocity (F32), and the CRC-32C of everything before.
type stateHeader struct {
	Config          uint64 // fingerprint
	Rank, Size      uint32
	Steps, K        uint64
	Age, Rounds     uint64 // of oktopk: past.age, past.steps
	Level, Even     uint32 // of oktopk: past.level, and 1 where past.even
	GlobalThreshold float32
	Words, Elements uint32
}

// fingerprint is a hash of the tensor's length and the configuration.
func (c Settings) fingerprint(n int) uint64 {
	h := fnv.New64a()
	chosen := c.chosen && c.Pattern == Dense // others are what they are where a program names them
	fmt.Fprintf(h, "%d %v %+v", n, chosen, c.Config)
	return h.Sum64()
}

// State returns what a [Reducer] with the same configuration needs to go on from here, bit for bit.
func (s *Reducer) State(ctx context.Context) ([]byte, error) { return s.state(ctx, false) }

// SharedState returns the part of [Reducer.State] that ranks have alike.
func (s *Reducer) SharedState(ctx context.Context) ([]byte, error) { return s.state(ctx, true) }

func (s *Reducer) state(ctx context.Context, shared bool) ([]byte, error) {
	const op = "state"
	if err := s.ready(); err != nil {
		return nil, base.OpError(op, err)
	}
	s.readPosted(ctx)
	kept := s.host[numKept:][:keptWords(s.size)]
	s.readSome(ctx, kept, numKept)
	if err := s.failure(); err != nil {
		return nil, base.OpError(op, err)
	}
	header := stateHeader{
		Config: s.cfg.fingerprint(s.n), Rank: uint32(s.rank), Size: uint32(s.size), Steps: uint64(s.steps),
		Age: uint64(s.past.age), Rounds: uint64(s.past.steps), Level: uint32(s.past.level), GlobalThreshold: s.past.globalThreshold,
		Words: uint32(len(kept)),
	}
	if !s.dense { // of which nothing but the residual is left
		header.K = uint64(s.k)
	}
	if s.past.even {
		header.Even = 1
	}
	if shared {
		header.Rank = header.Size
	} else if s.cfg.keeps() {
		header.Elements = uint32(s.held)
	}
	size := len(stateMagic) + binary.Size(header) + base.WordSize*(int(header.Words)+int(header.Elements)+1)
	state := append(make([]byte, 0, size), stateMagic...)
	state, err := binary.Append(state, binary.LittleEndian, header)
	if err == nil {
		state, err = binary.Append(state, binary.LittleEndian, kept)
	}
	if residual := state[len(state) : size-base.WordSize]; err == nil && len(residual) > 0 {
		err = s.rt.CopyOut(residual, s.residual)
		state = state[:size-base.WordSize]
	}
	if err != nil {
		return nil, base.OpError(op, err)
	}
	return base.Seal(state), nil
}

// RestoreRanks returns the ranks of a run of saved ranks whose states a rank of size passes to Restore.
func RestoreRanks(saved, size, rank int) []int {
	var ranks []int
	for r := rank; r < saved; r += size {
		ranks = append(ranks, r)
	}
	if len(ranks) == 0 {
		return []int{rank % saved}
	}
	return ranks
}

// Restore makes s what it was when [Reducer.State] returned its state, or puts states of another world size together.
// After [comm.ErrArgument] and [comm.ErrMismatch], s is as it was.
func (s *Reducer) Restore(ctx context.Context, states ...[]byte) error {
	const op = "restore"
	if err := s.ready(); err != nil {
		return base.OpError(op, err)
	}
	restore, err := s.PrepareRestore(ctx, states...)
	if err == nil {
		err = restore(ctx)
	}
	return base.OpError(op, err)
}

// savedState is a state that was parsed.
type savedState struct {
	stateHeader
	cfg      Settings // of the step that saved it
	numbers  []int32
	residual []byte
}

// parseAll parses the states that this rank is given, and checks that they are its.
func (s *Reducer) parseAll(states [][]byte) ([]savedState, error) {
	if len(states) == 0 {
		return nil, fmt.Errorf("%w: no state", comm.ErrArgument)
	}
	var parsed []savedState
	var ranks []int
	for i, state := range states {
		p, err := s.parse(state)
		if err != nil {
			return nil, fmt.Errorf("state %d: %w", i, err)
		}
		parsed, ranks = append(parsed, p), append(ranks, int(p.Rank))
		if p.Config != parsed[0].Config {
			return nil, fmt.Errorf("state %d: %w: another pattern was chosen for it than for the first", i, comm.ErrMismatch)
		}
		if p.Size != parsed[0].Size || p.Steps != parsed[0].Steps {
			return nil, fmt.Errorf("state %d: %w: of %d ranks after %d steps, the first is of %d after %d", i, comm.ErrMismatch,
				p.Size, p.Steps, parsed[0].Size, parsed[0].Steps)
		}
	}
	saved := int(parsed[0].Size)
	if len(parsed) == 1 && ranks[0] == saved && saved == s.size {
		return parsed, nil // what ranks share
	}
	if want := RestoreRanks(saved, s.size, s.rank); !slices.Equal(ranks, want) {
		return nil, fmt.Errorf("%w: the states are those of the ranks %v of %d, rank %d of %d needs %v", comm.ErrMismatch, ranks, saved, s.rank, s.size, want)
	}
	return parsed, nil
}

// parse checks a state, by itself.
func (s *Reducer) parse(state []byte) (p savedState, err error) {
	wrong := func(format string, args ...any) (savedState, error) {
		return savedState{}, fmt.Errorf("%w: %s", comm.ErrArgument, fmt.Sprintf(format, args...))
	}
	body, err := base.Unseal(state, stateMagic, "a Reducer")
	if err != nil {
		return p, err
	}
	size, err := binary.Decode(body, binary.LittleEndian, &p.stateHeader)
	if err != nil {
		return wrong("the state is damaged")
	}
	var known bool
	p.cfg, known = s.chosenFor(p.Config)
	elements := 0
	if p.cfg.keeps() && p.Rank != p.Size {
		elements = s.held
	}
	if !known {
		return p, fmt.Errorf("%w: the state is of rank %d of %d, with another configuration or length of the tensor", comm.ErrMismatch, p.Rank, p.Size)
	}
	rest, words := body[size:], keptWords(int(p.Size))
	dense := (p.cfg.Pattern == Dense || p.cfg.Pattern == Auto) && p.K > 0
	if p.Rank > p.Size || p.Size < 1 || p.Size > 1<<20 || int(p.Words) != words || int(p.Elements) != elements || len(rest) != base.WordSize*(words+elements) ||
		p.K > uint64(s.n) || dense || p.Steps > math.MaxInt64 || p.Age > math.MaxInt64 || p.Rounds > math.MaxInt64 {
		return wrong("the state has %d numbers, %d elements and k = %d in %d bytes", p.Words, p.Elements, p.K, len(state))
	}
	p.numbers, p.residual = make([]int32, words), rest[base.WordSize*words:]
	if _, err := binary.Decode(rest, binary.LittleEndian, p.numbers); err != nil {
		return wrong("the state is damaged: %v", err)
	}
	if !p.plausible(s.n) {
		return wrong("the state has numbers that no step leaves")
	}
	return p, nil
}

// plausible reports whether the numbers are such as steps leave. Those that follow
// trust them: partitions say where selected entries go.
func (p *savedState) plausible(n int) bool {
	if p.numbers[numFaults-numKept] != 0 {
		return false
	}
	if uses, _ := find(&p.cfg, int(p.K), n, int(p.Size)); p.K == 0 || !NeedsHost(uses) { // there are no partitions
		return true
	}
	bounds := p.numbers[numBounds-numKept:]
	return bounds[0] == 0 && bounds[p.Size] == int32(n) && slices.IsSorted(bounds)
}

// settled has the host wait for the device.
func (s *Reducer) settled(ctx context.Context) error {
	if err := s.order.Drain(ctx); err != nil {
		return err
	}
	return s.order.HostAfterCompute(ctx)
}

// restore takes what was parsed.
func (s *Reducer) restore(ctx context.Context, states []savedState) error {
	first := &states[0]
	s.steps, s.step = int(first.Steps), step{counted: true}
	if pattern := first.cfg.Pattern; pattern == Auto {
		s.become(pattern, nil)
	} else if pattern != s.cfg.Pattern {
		s.become(pattern, &Choice{Pattern: pattern})
	}
	if int(first.Size) == s.size {
		s.plan(ctx, int(first.K), false)
		s.resetNumbers()
		s.set(numKept, first.numbers...)
		s.past = past{age: int(first.Age), steps: int(first.Rounds), level: int(first.Level), even: first.Even != 0, globalThreshold: first.GlobalThreshold}
	} else {
		s.release(s.permanent)
		s.k = 0
	}
	residual := first.residual
	if int(first.Size) != s.size {
		residual = s.gather(states)
	}
	if s.err == nil && len(residual) > 0 {
		s.check(s.rt.CopyIn(s.residual, residual))
	} else if s.residual != 0 {
		s.fill(s.residual, s.held)
	}
	return s.err
}

// gather makes of the states of another world size what this rank has of their
// residuals and velocities. The sum of the residuals over the ranks stays, as they
// are sums of gradients. A velocity is made of one rank's gradients, which are as
// large with any number of ranks: their mean stays, and ranks that were not there
// before get a share as well.
func (s *Reducer) gather(states []savedState) []byte {
	sum := make([]float32, len(states[0].residual)/base.WordSize)
	for _, state := range states {
		saved, from := int(state.Size), int(state.Rank)
		// Ranks from, from + saved, … have this state.
		share := float32(s.size) / float32(saved) / float32((s.size-1-from%s.size)/saved+1)
		for i := range sum {
			x := math.Float32frombits(binary.LittleEndian.Uint32(state.residual[base.WordSize*i:]))
			switch {
			case i >= s.n:
				sum[i] += share * x
			case from%s.size == s.rank:
				sum[i] += x
			}
		}
	}
	return hostmem.Bytes(sum)
}

// ScaleResidual multiplies the residual, and the thresholds that were found for it, by a factor.
func (s *Reducer) ScaleResidual(factor float64) error {
	const op = "scale residual"
	switch f := float32(factor); {
	case s.ready() != nil:
		return base.OpError(op, s.ready())
	case !(factor >= 0) || math.IsInf(float64(f), 0):
		return base.OpError(op, fmt.Errorf("%w: factor is %v, want a finite number, not negative", comm.ErrArgument, factor))
	case !s.cfg.keeps():
		return nil
	default:
		ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
		defer cancel()
		if s.readPosted(ctx); s.err != nil {
			return base.OpError(op, s.failure())
		}
		s.set(numFactor, int32(math.Float32bits(f)))
	}
	for _, x := range []struct {
		ptr uintptr
		n   int
	}{{s.residual, s.held}, {s.at(numState), 1}, {s.at(numBracket), 1}} {
		s.do(func() error { return s.kernels.Scale(x.ptr, dtype.F32, x.n, s.at(numFactor)) })
	}
	return base.OpError(op, s.err)
}

// chosenFor returns the configuration with which s goes on from a state with this fingerprint, if there is
// one: that of s, or one that Auto may have become. As what values travelled does not count
// unless there is a residual with one and none with the other.
func (s *Reducer) chosenFor(fingerprint uint64) (Settings, bool) {
	patterns := []string{s.configured.Pattern}
	if s.configured.Pattern == Auto {
		patterns = append(Patterns(), Auto)
	}
	for _, pattern := range patterns {
		for _, values := range Values() {
			saved := s.configured
			saved.Values = values
			cfg, err := saved.Choose(pattern)
			if err != nil || cfg.fingerprint(s.n) != fingerprint {
				continue
			}
			kept := cfg.keeps()
			cfg, err = s.configured.Choose(pattern)
			return cfg, err == nil && cfg.keeps() == kept
		}
	}
	return s.cfg, false
}

// PrepareRestore checks what [Reducer.Restore] is given, and waits for the device until ctx is
// done. Nothing has changed until restore is called.
func (s *Reducer) PrepareRestore(ctx context.Context, states ...[]byte) (restore func(context.Context) error, err error) {
	parsed, err := s.parseAll(states)
	if err == nil {
		err = s.settled(ctx)
	}
	return func(ctx context.Context) error { return s.restore(ctx, parsed) }, err
}

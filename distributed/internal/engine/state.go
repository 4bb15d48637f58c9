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
	"github.com/tutti-go/tutti/distributed/internal/state"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
)

// kind identifies the states of a Reducer.
var kind = state.Kind{
	Name:    "tutti-sparse",
	Version: 6,
	Owner:   "a Reducer",
}

// headerBytes bounds the fields of a state other than numbers and residual.
const headerBytes = 128

// savedState has the fields of a state, in order.
type savedState struct {
	fingerprint uint64    // of the Reducer that saved it
	rank, size  int       // rank is size in a state that the ranks share
	steps       int       // steps made so far
	k           int       // entries for which thresholds and partitions hold; 0: there are none
	hostState   hostState // without pending
	numbers     []int32   // kept numbers of the device
	residual    []byte    // F32, followed by the velocity; empty: none

	cfg Settings // of the saving step
}

// fingerprint is a hash of the tensor's length and the configuration.
func (c Settings) fingerprint(n int) uint64 {
	h := fnv.New64a()
	chosen := c.chosen && c.Pattern == sparsity.Dense // other patterns are the same as if a program names them
	fmt.Fprintf(h, "%d %v %+v", n, chosen, c.Config)
	return h.Sum64()
}

// State returns the state from which a [Reducer] with the same configuration continues, bit for bit.
func (s *Reducer) State(ctx context.Context) ([]byte, error) {
	return s.state(ctx, false)
}

// SharedState returns the part of [Reducer.State] that is equal on all ranks.
func (s *Reducer) SharedState(ctx context.Context) ([]byte, error) {
	return s.state(ctx, true)
}

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
	rank := s.rank
	elements := 0
	if shared {
		rank = s.size
	} else if s.cfg.keeps() {
		elements = s.held
	}
	k := s.k
	if s.dense { // only its residual matters
		k = 0
	}
	e := state.NewEncoder(kind, headerBytes+base.WordSize*(len(kept)+elements))
	e.Uint64(s.cfg.fingerprint(s.n))
	e.Int(rank)
	e.Int(s.size)
	e.Int(s.steps)
	e.Int(k)
	e.Int(s.hostState.age)
	e.Int(s.hostState.steps)
	e.Int(s.hostState.level)
	e.Bool(s.hostState.even)
	e.Float32(s.hostState.globalThreshold)
	numbers := e.Extend(base.WordSize * len(kept))
	for i, x := range kept {
		binary.LittleEndian.PutUint32(numbers[base.WordSize*i:], uint32(x))
	}
	residual := e.Extend(base.WordSize * elements)
	if elements > 0 {
		if err := s.rt.CopyOut(residual, s.residual); err != nil {
			return nil, base.OpError(op, err)
		}
	}
	return e.Seal(), nil
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

// Restore restores the state that [Reducer.State] returned, or combines states of another world size. After
// [comm.ErrArgument] and [comm.ErrMismatch], s is unchanged.
func (s *Reducer) Restore(ctx context.Context, states ...[]byte) error {
	const op = "restore"
	if err := s.ready(); err != nil {
		return base.OpError(op, err)
	}
	restore, err := s.PrepareRestore(ctx, states...)
	if err != nil {
		return base.OpError(op, err)
	}
	return base.OpError(op, restore(ctx))
}

// parseAll parses the states of this rank, and checks that they belong to it.
func (s *Reducer) parseAll(states [][]byte) ([]savedState, error) {
	if len(states) == 0 {
		return nil, fmt.Errorf("%w: no state", comm.ErrArgument)
	}
	parsed := make([]savedState, len(states))
	ranks := make([]int, len(states))
	for i, saved := range states {
		p, err := s.parse(saved)
		if err != nil {
			return nil, fmt.Errorf("state %d: %w", i, err)
		}
		parsed[i] = p
		ranks[i] = p.rank
		first := &parsed[0]
		if p.fingerprint != first.fingerprint {
			return nil, fmt.Errorf("state %d: %w: another pattern was chosen for it than for the first", i, comm.ErrMismatch)
		}
		if p.size != first.size || p.steps != first.steps {
			return nil, fmt.Errorf("state %d: %w: of %d ranks after %d steps, the first is of %d after %d",
				i, comm.ErrMismatch, p.size, p.steps, first.size, first.steps)
		}
	}
	saved := parsed[0].size
	if len(parsed) == 1 && ranks[0] == saved && saved == s.size {
		return parsed, nil // the shared part
	}
	if want := RestoreRanks(saved, s.size, s.rank); !slices.Equal(ranks, want) {
		return nil, fmt.Errorf("%w: the states are those of the ranks %v of %d, rank %d of %d needs %v",
			comm.ErrMismatch, ranks, saved, s.rank, s.size, want)
	}
	return parsed, nil
}

// parse parses and checks one state.
func (s *Reducer) parse(saved []byte) (savedState, error) {
	d := state.NewDecoder(kind, saved)
	p := savedState{fingerprint: d.Uint64()}
	p.rank = d.Int(MaxRanks)
	p.size = d.Int(MaxRanks)
	if err := d.Err(); err != nil {
		return savedState{}, err
	}
	var known bool
	p.cfg, known = s.chosenFor(p.fingerprint)
	if !known {
		return savedState{}, fmt.Errorf("%w: the state is of rank %d of %d, with another configuration or length "+
			"of the tensor", comm.ErrMismatch, p.rank, p.size)
	}
	p.steps = d.Int(math.MaxInt)
	p.k = d.Int(s.n)
	p.hostState.age = d.Int(math.MaxInt)
	p.hostState.steps = d.Int(math.MaxInt)
	p.hostState.level = d.Int(math.MaxInt32)
	p.hostState.even = d.Bool()
	p.hostState.globalThreshold = d.Float32()
	numbers := d.Bytes()
	p.residual = d.Bytes()
	if err := d.End(); err != nil {
		return savedState{}, err
	}
	elements := 0
	if p.cfg.keeps() && p.rank != p.size {
		elements = s.held
	}
	dense := p.cfg.Pattern == sparsity.Dense || p.cfg.Pattern == sparsity.Auto
	switch {
	case p.size < 1 || p.rank > p.size:
		d.Damaged("rank %d of %d", p.rank, p.size)
	case len(numbers) != base.WordSize*keptWords(p.size) || len(p.residual) != base.WordSize*elements:
		d.Damaged("%d bytes of numbers and %d of the residual", len(numbers), len(p.residual))
	case dense && p.k > 0:
		d.Damaged("k is %d for pattern %s", p.k, p.cfg.Pattern)
	}
	if err := d.Err(); err != nil {
		return savedState{}, err
	}
	p.numbers = make([]int32, len(numbers)/base.WordSize)
	for i := range p.numbers {
		p.numbers[i] = int32(binary.LittleEndian.Uint32(numbers[base.WordSize*i:]))
	}
	if !p.plausible(s.n) {
		d.Damaged("it has numbers that no step leaves")
	}
	return p, d.Err()
}

// MaxRanks bounds the ranks of a state.
const MaxRanks = 1 << 20

// plausible reports whether steps can leave these numbers. Later steps trust them: partitions determine where selected
// entries are sent.
func (p *savedState) plausible(n int) bool {
	if p.numbers[numIndexFaults-numKept] != 0 {
		return false
	}
	uses, _ := find(&p.cfg, p.k, n, p.size)
	if p.k == 0 || !sparsity.NeedsHost(uses) { // there are no partitions
		return true
	}
	bounds := p.numbers[numBounds-numKept:]
	return bounds[0] == 0 && bounds[p.size] == int32(n) && slices.IsSorted(bounds)
}

// waitDevice makes the host wait for the device.
func (s *Reducer) waitDevice(ctx context.Context) error {
	if err := s.order.Drain(ctx); err != nil {
		return err
	}
	return s.order.HostAfterCompute(ctx)
}

// restore installs the parsed states.
func (s *Reducer) restore(ctx context.Context, states []savedState) error {
	first := &states[0]
	s.steps = first.steps
	s.step = step{counted: true}
	if pattern := first.cfg.Pattern; pattern == sparsity.Auto {
		s.become(pattern, nil)
	} else if pattern != s.cfg.Pattern {
		s.become(pattern, &Choice{Pattern: pattern})
	}
	residual := first.residual
	if first.size == s.size {
		s.plan(ctx, first.k, false)
		s.resetNumbers()
		s.set(numKept, first.numbers...)
		s.hostState = first.hostState
	} else {
		s.release(s.permanent)
		s.k = 0
		residual = s.gather(states)
	}
	if s.err == nil && len(residual) > 0 {
		s.check(s.rt.CopyIn(s.residual, residual))
	} else if s.residual != 0 {
		s.fill(s.residual, s.held)
	}
	return s.err
}

// gather makes this rank's residual and velocity from states of another world size. The sum of the residuals over the
// ranks is kept, as they are sums of gradients. A velocity consists of one rank's gradients, whose size does not
// depend on the number of ranks: the mean is kept, and additional ranks get a share as well.
func (s *Reducer) gather(states []savedState) []byte {
	sum := make([]float32, len(states[0].residual)/base.WordSize)
	for _, saved := range states {
		// Ranks first, first + saved.size, … have this state.
		first := saved.rank % s.size
		holders := (s.size-1-first)/saved.size + 1
		share := float32(s.size) / float32(saved.size) / float32(holders)
		for i := range sum {
			x := math.Float32frombits(binary.LittleEndian.Uint32(saved.residual[base.WordSize*i:]))
			switch {
			case i >= s.n:
				sum[i] += share * x
			case first == s.rank:
				sum[i] += x
			}
		}
	}
	return hostmem.Bytes(sum)
}

// ScaleResidual multiplies the residual by a factor. Thresholds stay: if the factor is a decay, gradients do not
// change with it, and otherwise a threshold that no longer works is replaced.
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
		s.readPosted(ctx)
		if s.err != nil {
			return base.OpError(op, s.failure())
		}
		s.set(numFactor, int32(math.Float32bits(f)))
	}
	s.do(func() error {
		return s.kernels.Scale(s.residual, dtype.F32, s.held, s.address(numFactor))
	})
	return base.OpError(op, s.err)
}

// chosenFor returns the configuration with which s continues from a state with this fingerprint, if there is one: its
// own, or one that Auto may have chosen. The codec does not count unless there is a residual with one and none with
// the other.
func (s *Reducer) chosenFor(fingerprint uint64) (Settings, bool) {
	patterns := []string{s.configured.Pattern}
	if s.configured.Pattern == sparsity.Auto {
		patterns = append(sparsity.Patterns(), sparsity.Auto)
	}
	for _, pattern := range patterns {
		for _, values := range sparsity.Values() {
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

// PrepareRestore checks the arguments of [Reducer.Restore], and waits for the device, until ctx ends. Nothing changes
// until restore is called.
func (s *Reducer) PrepareRestore(ctx context.Context,
	states ...[]byte) (restore func(context.Context) error, err error) {
	parsed, err := s.parseAll(states)
	if err != nil {
		return nil, err
	}
	if err := s.waitDevice(ctx); err != nil {
		return nil, err
	}
	return func(ctx context.Context) error { return s.restore(ctx, parsed) }, nil
}

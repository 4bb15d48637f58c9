package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/measure"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
)

const (
	trialElements = 1 << 24 // maximum elements of a trial
	firstElements = 1 << 14 // of the first one
	trialSeconds  = 0.012   // limit of a step of topkA
	roundsSeconds = 0.15    // time of the rounds of all patterns, if all are like topkA
	batch         = 8       // steps timed together, on devices with streams
	shifts        = 1 << 12 // gradients made from random numbers, each shifted by one element
	randomBlock   = 1 << 16 // distinct random numbers; the others repeat them
)

// decide makes the choice, which is part of the step: if that is rolled back, the next one chooses again, as it does
// on ranks on which the error prevented a choice.
func (s *Reducer) decide(ctx context.Context, dt dtype.DType) {
	choice, err := choose(ctx, s.rt, s.c, s.n, dt, s.configured)
	if err != nil {
		s.check(err)
		return
	}
	s.become(choice.Pattern, choice)
}

// become switches to a pattern. Thresholds and partitions start over.
func (s *Reducer) become(pattern string, choice *Choice) {
	cfg, err := s.configured.Choose(pattern)
	s.check(err)
	s.cfg = cfg
	s.codec = cfg.codec()
	s.choice = choice
	s.chose = choice != nil
	s.k = 0
	s.resetNumbers()
	s.prepare()
}

// Choice returns the result of [Auto], nil before the choice and for another pattern.
func (s *Reducer) Choice() *Choice { return s.choice }

// choose makes the ranks choose a pattern for n elements. It is collective.
func choose(ctx context.Context, rt runtime.Runtime, c comm.Communicator, n int, dt dtype.DType,
	cfg Settings) (*Choice, error) {
	started := time.Now()
	p := &probe{
		ctx:   ctx,
		rt:    rt,
		c:     c,
		dt:    dt,
		order: base.NewOrder(rt, c),
		cfg:   cfg,
		n:     min(n, trialElements),
		batch: 1,
		rng:   rand.New(rand.NewPCG(uint64(c.Rank()), uint64(n))),
	}
	k := count(cfg.Density, n)
	if c.WorldSize() == 1 || 2*k >= n { // there is nothing to send, or too much
		return &Choice{
			Pattern:  sparsity.Dense,
			Elements: n,
			K:        k,
		}, nil
	}
	if p.order.Streams != nil {
		p.batch = batch
	}
	p.cfg.Schedule = Schedule{} // clipping takes the same time with every pattern
	p.cfg.ClipNorm = 0
	p.err = p.allocate()
	usual := p.fit()
	var trials []Trial
	for _, pattern := range p.candidates() {
		t := Trial{Pattern: pattern}
		if pattern != sparsity.Dense || p.bears(t, usual) {
			trials = append(trials, t)
		}
	}
	roundSeconds := usual * float64(p.batch*len(trials))
	rounds := min(max(int(roundsSeconds/roundSeconds), 3), 31)
	seconds := p.try(p.n, rounds, trials...)
	choice := choiceOf(trials, seconds, p.n, count(cfg.Density, p.n))
	if err := errors.Join(p.err, rt.Deallocate(p.random)); err != nil {
		return nil, fmt.Errorf("choosing a pattern: %w", err)
	}
	if c.Rank() == 0 {
		slog.Info("distributed: chose a pattern",
			"pattern", choice.Pattern, "elements", n, "density", cfg.Density, "ranks", c.WorldSize(),
			"trials", fmt.Sprint(choice.Trials), "took", time.Since(started).Round(time.Millisecond))
	}
	return choice, nil
}

// probe measures patterns. All ranks decide by times on which they have agreed. Its first error stays, and later
// trials return zero times.
type probe struct {
	ctx    context.Context   // of the call that chooses
	rt     runtime.Runtime   // of the tensor's memory
	c      comm.Communicator // the patterns are measured on it
	dt     dtype.DType       // of the gradients
	order  base.Order        // order of c and the compute stream
	cfg    Settings          // of the Reducer that chooses
	n      int               // elements of a trial
	batch  int               // steps timed together, which trialSeconds bounds as well
	rng    *rand.Rand        // of gradients, seeded
	random uintptr           // array from which gradients are shifted
	made   int               // gradients made so far
	err    error             // the first error; later trials take no time
}

// fit shortens the tensor until a step of topkA takes no more than trialSeconds, and returns the time of such a step.
// It begins with few elements, because a step with all might take minutes.
func (p *probe) fit() (usual float64) {
	whole := p.n
	n := firstElements
	for {
		p.n = min(whole, n)
		usual = p.try(p.n, 3, Trial{Pattern: sparsity.TopkA})[0]
		if p.n == whole || 2*usual > trialSeconds || p.err != nil {
			break
		}
		growth := min(16, trialSeconds/usual)
		n = int(float64(p.n) * growth)
	}
	steps := max(int(trialSeconds/usual), 1)
	p.batch = min(p.batch, steps)
	return usual
}

// candidates returns the patterns that may be the fastest. TopkA and topkAopt send 2k(P-1) elements at once. gtopk and
// oktopk send less among three or more ranks, in more messages, and oktopk as many between two. No other sparse
// pattern was the fastest by a tenth in any measurement.
func (p *probe) candidates() []string {
	patterns := []string{sparsity.TopkA, sparsity.TopkAopt}
	cfg := p.cfg
	if p.c.WorldSize() > 2 {
		patterns = append(patterns, sparsity.Gtopk)
	}
	cfg.Pattern = sparsity.Oktopk
	k := count(cfg.Density, p.n)
	uses, _ := find(&cfg, k, p.n, p.c.WorldSize())
	if uses == sparsity.Oktopk {
		patterns = append(patterns, sparsity.Oktopk)
	}
	return append(patterns, sparsity.Dense)
}

// bears reports whether a dense step takes at most 1.5 times the usual time, which a part of it may show.
func (p *probe) bears(dense Trial, usual float64) bool {
	part := max(p.n/64, 1)
	for {
		seconds := p.try(part, 1, dense)[0]
		if seconds > 1.5*usual {
			return false
		}
		if part == p.n {
			return true
		}
		part = min(4*part, p.n)
	}
}

// choiceOf returns the fastest of trials by the seconds of their steps, or dense if that is slower by less than a
// twentieth.
func choiceOf(trials []Trial, seconds []float64, n, k int) *Choice {
	choice := &Choice{
		Elements: n,
		K:        k,
		Trials:   trials,
	}
	best := slices.Min(seconds)
	for i := range trials {
		t := &trials[i]
		t.Time = time.Duration(seconds[i] * float64(time.Second))
		fastest := choice.Pattern == "" && seconds[i] == best
		dense := t.Pattern == sparsity.Dense && 20*seconds[i] <= 21*best
		if fastest || dense {
			choice.Pattern = t.Pattern
		}
	}
	slices.SortStableFunc(choice.Trials, func(a, b Trial) int {
		return cmp.Compare(a.Time, b.Time)
	})
	return choice
}

// try returns the seconds of a complete step of each pattern on n elements, on the slowest rank: the medians of
// rounds.
func (p *probe) try(n, rounds int, trials ...Trial) []float64 {
	medians := make([]float64, len(trials))
	steps := make([]measure.Round, len(trials))
	if p.err != nil {
		return medians
	}
	gradient, err := runtime.New(p.rt, p.dt, n)
	if err != nil {
		p.err = err
		return medians
	}
	defer func() { p.err = errors.Join(p.err, gradient.Free()) }()
	for i, t := range trials {
		s, err := p.reducer(t.Pattern, n)
		if s != nil {
			defer func() { p.err = errors.Join(p.err, s.Close()) }()
		}
		if err != nil {
			p.err = err
			return medians
		}
		steps[i] = func() (float64, error) { return p.time(s, gradient) }
	}
	times, err := measure.InTurns(1, rounds, measure.Alone, steps...)
	p.err = err
	for i := range times {
		medians[i] = measure.Median(times[i])
	}
	return medians
}

// reducer returns a reducer with a pattern, in the state after many steps. It must be closed, also after an error if
// it is not nil.
func (p *probe) reducer(pattern string, n int) (*Reducer, error) {
	cfg, err := p.cfg.Choose(pattern)
	if err != nil {
		return nil, err
	}
	s, err := NewReducer(p.rt, p.c, n, cfg)
	if err != nil {
		return nil, err
	}
	return s, p.warmUp(s)
}

// time takes steps and returns the seconds of one on the slowest rank.
func (p *probe) time(s *Reducer, gradient *runtime.Tensor) (float64, error) {
	to, err := gradient.Ptr()
	if err != nil {
		return 0, err
	}
	if err := errors.Join(p.order.HostAfterAll(p.ctx), p.c.Barrier(p.ctx)); err != nil {
		return 0, err
	}
	started := time.Now()
	for range p.batch {
		p.made++
		from := p.random + uintptr(p.made%shifts*p.dt.Size())
		if err := p.rt.Copy(to, from, gradient.Bytes()); err != nil {
			return 0, err
		}
		if err := s.AllReduce(p.ctx, gradient); err != nil {
			return 0, err
		}
	}
	if err := errors.Join(p.c.Sync(p.ctx), p.order.HostAfterCompute(p.ctx)); err != nil {
		return 0, err
	}
	seconds := time.Since(started).Seconds() / float64(p.batch)
	return largest(p.ctx, p.rt, p.c, seconds)
}

// allocate allocates memory and fills it with random numbers.
func (p *probe) allocate() (err error) {
	values := make([]float32, min(p.n+shifts, randomBlock))
	bytes := (p.n + shifts) * p.dt.Size()
	for i := range values {
		values[i] = float32(p.rng.NormFloat64())
	}
	if p.random, err = p.rt.Allocate(bytes); err != nil {
		return err
	}
	raw := make([]byte, len(values)*p.dt.Size())
	return errors.Join(dtype.FromFloat32(raw, p.dt, values), p.repeat(p.random, raw, bytes))
}

// warmUp sets the residual to its state after many steps: as many entries reach a threshold as are sent.
func (p *probe) warmUp(s *Reducer) error {
	if s.residual == 0 || s.cfg.lossless() {
		return nil
	}
	interval := float64(s.n) / float64(count(s.cfg.Density, s.n))
	if s.cfg.Pattern == sparsity.Oktopk { // only k entries of all ranks together are in the result
		interval *= float64(s.size)
	}
	values := make([]float32, min(s.n, randomBlock))
	measure.DrawResidual(p.rng, values, 1, interval)
	return p.repeat(s.residual, hostmem.Bytes(values), s.n*base.WordSize)
}

// repeat fills memory with repetitions of values.
func (p *probe) repeat(ptr uintptr, values []byte, size int) error {
	if err := p.rt.CopyIn(ptr, values[:min(len(values), size)]); err != nil {
		return err
	}
	for done := len(values); done < size; done *= 2 {
		length := min(done, size-done)
		if err := p.rt.Copy(ptr+uintptr(done), ptr, length); err != nil {
			return err
		}
	}
	return nil
}

// Choices are results of [Auto] for several tensors: tensors of similar length and with one configuration have the
// same.
type Choices map[string]*Choice

// Of returns the choice for a tensor of n elements. If there is none for similar tensors, all ranks make it.
func (all Choices) Of(ctx context.Context, rt runtime.Runtime, c comm.Communicator, n int, dt dtype.DType,
	cfg Settings) (*Choice, error) {
	if err := base.CheckGradientType(dt); err != nil {
		return nil, err
	}
	class := fmt.Sprintf("%v %d %+v", dt, sizeClass(n), cfg)
	if all[class] == nil {
		choice, err := choose(ctx, rt, c, n, dt, cfg)
		if err != nil {
			return nil, err
		}
		all[class] = choice
	}
	return all[class], nil
}

// sizeClass returns the class of lengths that share a choice, a factor of the square root of two wide.
func sizeClass(n int) int {
	return int(math.Round(2 * math.Log2(float64(max(n, 1)))))
}

package sparse

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
	"github.com/tutti-go/tutti/runtime"
)

// Auto, for [Config.Pattern], is the pattern whose steps are the fastest here: on this
// communicator, with this runtime's kernels, for this length and density. These select up to
// five of [Patterns]; the ranks make some steps with each on random numbers, and agree on a
// [Choice], which stays. It is dense where a sparse pattern is faster by less than a
// twentieth. Patterns that send less need more steps for the same accuracy, which does not count.
//
// Auto for [Config.Values] as well, which takes Auto for the pattern, is the fastest of [F32], [Lossless], [I8], [I4]
// and [I2], which each of these patterns is measured with; what is faster by less than a twentieth than one before it is not taken.
//
// A [Reducer] does so in the first step that is not dense by its schedule, for
// Config.Density; a package ddp when it is made, once for all buckets of about
// the same length. It takes less than a second where steps with 16,384 elements take less
// than 12 ms, and memory meanwhile, of up to eleven times the tensor's size, about twenty
// with momentum, but for no more than 16,777,216 elements.
const Auto = "auto"

// Choice is what the ranks found for [Auto].
type Choice struct {
	// Pattern and Values are those that are used.
	Pattern, Values string
	// Elements and K are what was measured: only a part of a tensor whose steps take
	// more than 12 ms.
	Elements, K int
	// Trials are the patterns that were measured, the fastest first.
	Trials []Trial
	// Took is how long it took.
	Took time.Duration
}

// Trial is what a step of a pattern takes: the median of rounds, on the slowest rank.
type Trial struct {
	Pattern, Values string
	Time            time.Duration
}

// String is as in "topkA 1.2ms" or "topkA i8 0.6ms".
func (t Trial) String() string {
	return fmt.Sprintf("%s %v", cellName(t.Pattern, t.Values), t.Time.Round(100*time.Nanosecond))
}

// cellName is the name of a pattern, and of what its values travel as unless that is F32.
func cellName(pattern, values string) string {
	if values == F32 {
		return pattern
	}
	return pattern + " " + values
}

const (
	trialElements = 1 << 24 // most elements of a trial
	firstElements = 1 << 14 // of the first one
	trialSeconds  = 0.012   // most that a step of topkA takes; half of it where values are weighed
	roundsSeconds = 0.15    // what the rounds of all patterns take, if all are like topkA
	batch         = 8       // steps that are timed together, on devices with streams
	shifts        = 1 << 12 // gradients that random numbers make, each shifted by one element
	randomBlock   = 1 << 16 // numbers that are drawn; the others repeat them
)

// decide makes the choice, which is part of the step: when that is rolled back, the next one chooses
// again, as it does on ranks that the error has kept from choosing.
func (s *Reducer) decide(ctx context.Context, dt dtype.DType) {
	choice, err := choose(ctx, s.rt, s.c, s.n, dt, s.given)
	if s.check(err); s.err == nil {
		s.become(choice.Pattern, choice.Values, choice)
		s.chose = true
	}
}

// become makes a pattern that of the configuration. Thresholds and partitions start anew.
func (s *Reducer) become(pattern, values string, choice *Choice) {
	cfg, err := s.given.with(pattern, values)
	s.check(err)
	s.cfg, s.codec, s.choice, s.k, s.chose = cfg, cfg.codec(), choice, 0, false
	s.resetNumbers()
	s.prepare()
}

// with is c with a pattern in the place of Auto, and values, and defaults.
func (c Config) with(pattern, values string) (Config, error) {
	c.Pattern, c.Values = pattern, values
	return c.WithDefaults()
}

// choose has the ranks make the choice for n elements. It is collective.
func choose(ctx context.Context, rt runtime.Runtime, c comm.Communicator, n int, dt dtype.DType, cfg Config) (*Choice, error) {
	started, values, limit := time.Now(), []string{cmp.Or(cfg.Values, F32)}, trialSeconds
	if cfg.Values == Auto {
		values, limit = []string{F32, Lossless, I8, I4, I2}, trialSeconds/2
	}
	if k := count(cfg.Density, n); c.WorldSize() == 1 || 2*k >= n { // there is nothing to send, or too much
		return &Choice{Pattern: Dense, Values: values[0], Elements: n, K: k}, nil
	}
	cfg.Schedule, cfg.ClipNorm = Schedule{}, 0 // clipping takes as long with every pattern
	p := &probe{ctx: ctx, rt: rt, c: c, order: base.NewOrder(rt, c), cfg: cfg, n: min(n, trialElements), values: values, limit: limit,
		batch: 1, rng: rand.New(rand.NewPCG(uint64(c.Rank()), uint64(n)))}
	if p.order.Streams != nil {
		p.batch = batch
	}
	choice, err := p.run(dt)
	if err = errors.Join(err, p.random.Free()); err != nil {
		return nil, fmt.Errorf("choosing a pattern: %w", err)
	}
	choice.Took = time.Since(started)
	if c.Rank() == 0 {
		slog.Info("distributed: chose a pattern", "pattern", cellName(choice.Pattern, choice.Values), "elements", n, "density", cfg.Density, "ranks", c.WorldSize(),
			"trials", fmt.Sprint(choice.Trials), "took", choice.Took.Round(time.Millisecond))
	}
	return choice, nil
}

// probe measures patterns. All ranks decide by times that they have agreed on.
type probe struct {
	ctx    context.Context
	rt     runtime.Runtime
	c      comm.Communicator
	order  base.Order
	cfg    Config
	n      int      // elements of a trial
	values []string // of a pattern's trials, the most precise first
	limit  float64  // most seconds of a step of topkA, unless it has firstElements
	batch  int      // steps that are timed together, for which p.limit holds as well
	rng    *rand.Rand
	random *runtime.Tensor // shifts elements more than a gradient
	from   uintptr         // where they are
	made   int             // gradients
}

// allocate makes random numbers and memory.
func (p *probe) allocate(dt dtype.DType) (err error) {
	values := make([]float32, min(p.n+shifts, randomBlock))
	for i := range values {
		values[i] = float32(p.rng.NormFloat64())
	}
	raw := make([]byte, len(values)*dt.Size())
	if p.random, err = runtime.New(p.rt, dt, p.n+shifts); err != nil {
		return err
	}
	p.from, err = p.random.Ptr()
	return errors.Join(err, dtype.FromFloat32(raw, dt, values), p.repeat(p.from, raw, p.random.Bytes()))
}

// repeat fills memory with values, again and again.
func (p *probe) repeat(ptr uintptr, values []byte, size int) error {
	err := p.rt.CopyIn(ptr, values[:min(len(values), size)])
	for done := len(values); done < size && err == nil; done *= 2 {
		err = p.rt.Copy(ptr+uintptr(done), ptr, min(done, size-done))
	}
	return err
}

// run chooses.
func (p *probe) run(dt dtype.DType) (*Choice, error) {
	var usual float64
	var trials []Trial
	err := p.allocate(dt)
	if err == nil {
		usual, err = p.fit()
	}
	if err == nil {
		trials, err = p.candidates(usual)
	}
	if err != nil {
		return nil, err
	}
	rounds := int(roundsSeconds / usual / float64(p.batch*len(trials)))
	medians, err := p.try(p.n, min(max(rounds, 3), 31), trials...)
	if err != nil {
		return nil, err
	}
	return choiceOf(trials, medians, p.n, count(p.cfg.Density, p.n)), nil
}

// choiceOf is the fastest of trials whose steps took so many seconds, or dense if that is slower
// by less than a twentieth.
func choiceOf(trials []Trial, seconds []float64, n, k int) *Choice {
	choice := &Choice{Elements: n, K: k, Trials: trials}
	best := slices.Min(seconds)
	for i := range trials {
		t := &trials[i]
		t.Time = time.Duration(seconds[i] * float64(time.Second))
		if choice.Pattern == "" && seconds[i] == best || t.Pattern == Dense && 20*seconds[i] <= 21*best {
			choice.Pattern, choice.Values = t.Pattern, t.Values
		}
	}
	slices.SortStableFunc(choice.Trials, func(a, b Trial) int { return cmp.Compare(a.Time, b.Time) })
	return choice
}

// fit shortens the tensor until a step of topkA takes no more than p.limit, and returns what it takes then. It
// begins with few elements, because a step of all might take minutes.
func (p *probe) fit() (usual float64, err error) {
	for whole, n := p.n, firstElements; ; n = int(float64(p.n) * min(16, p.limit/usual)) {
		p.n = min(whole, n)
		seconds, err := p.try(p.n, 3, Trial{Pattern: TopkA, Values: p.values[0]})
		if err != nil {
			return 0, err
		}
		if usual = seconds[0]; p.n == whole || 2*usual > p.limit {
			p.batch = min(p.batch, max(int(p.limit/usual), 1))
			return usual, nil
		}
	}
}

// candidates returns the patterns that may be the fastest, where a step of topkA takes so many seconds, each with
// the values that suit it. TopkA and topkAopt send 2k(P-1) elements at once; gtopk and oktopk send less among
// three ranks and more, in more messages, and oktopk as many between two. No other sparse pattern
// was the fastest by a tenth in any measurement. Dense is out where the link is so slow that
// already a part takes longer.
func (p *probe) candidates(usual float64) (trials []Trial, err error) {
	patterns := []string{TopkA, TopkAopt}
	if p.c.WorldSize() > 2 {
		patterns = append(patterns, Gtopk)
	}
	cfg := p.cfg
	cfg.Pattern, cfg.Values = Oktopk, p.values[0]
	if uses, _ := find(&cfg, count(cfg.Density, p.n), p.n, p.c.WorldSize()); uses == Oktopk {
		patterns = append(patterns, Oktopk)
	}
	for _, pattern := range patterns {
		best, err := p.weigh(pattern, p.values)
		if err != nil {
			return nil, err
		}
		trials = append(trials, best)
	}
	var dense []string
	for i, values := range p.values {
		if i > 0 && values == Lossless { // as many bytes as F32
			continue
		}
		fits, err := p.bears(values, usual)
		if err != nil {
			return nil, err
		}
		if fits {
			dense = append(dense, values)
		}
	}
	if len(dense) == 0 {
		return trials, nil
	}
	best, err := p.weigh(Dense, dense)
	if trials = append(trials, best); best.Values != dense[0] {
		trials = append(trials, Trial{Pattern: Dense, Values: dense[0]})
	}
	return trials, err
}

// bears reports whether a dense step takes at most 1.5 times as long as usual, which a part of it may tell.
func (p *probe) bears(values string, usual float64) (bool, error) {
	for part := max(p.n/64, 1); ; part = min(4*part, p.n) {
		dense, err := p.try(part, 1, Trial{Pattern: Dense, Values: values})
		if err != nil || dense[0] > 1.5*usual || part == p.n {
			return err == nil && dense[0] <= 1.5*usual, err
		}
	}
}

// weigh returns the trial of a pattern whose steps are the fastest of those with some values: the first of them, or
// one that is faster by a twentieth than the best before it.
func (p *probe) weigh(pattern string, values []string) (best Trial, err error) {
	var trials []Trial
	for _, v := range values {
		trials = append(trials, Trial{Pattern: pattern, Values: v})
	}
	if len(trials) == 1 {
		return trials[0], nil
	}
	medians, err := p.try(p.n, 3, trials...)
	usual := math.Inf(1)
	for i, seconds := range medians {
		if 20*seconds < 19*usual {
			usual, best = seconds, trials[i]
		}
	}
	return best, err
}

// try returns the seconds of a step of each pattern on so many elements, until its work is done, on the slowest rank: the
// medians of rounds.
func (p *probe) try(n, rounds int, trials ...Trial) (medians []float64, err error) {
	gradient, err := runtime.New(p.rt, p.random.DType(), n)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, gradient.Free()) }()
	to, err := gradient.Ptr()
	if err != nil {
		return nil, err
	}
	var steps []measure.Round
	for _, t := range trials {
		cfg := p.cfg
		cfg.Pattern, cfg.Values = t.Pattern, t.Values
		s, err := New(p.rt, p.c, n, cfg)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		if err := p.settle(s); err != nil {
			return nil, err
		}
		steps = append(steps, func() (float64, error) {
			err := inOrder(func() error { return p.order.HostAfterAll(p.ctx) }, func() error { return p.c.Barrier(p.ctx) })
			started := time.Now()
			for i := 0; i < p.batch && err == nil; i++ {
				p.made++
				from := p.from + uintptr(p.made%shifts*gradient.DType().Size())
				err = inOrder(func() error { return p.rt.Copy(to, from, gradient.Bytes()) }, func() error { return s.AllReduce(p.ctx, gradient) })
			}
			if err == nil {
				err = errors.Join(p.c.Sync(p.ctx), p.order.HostAfterCompute(p.ctx))
			}
			if err != nil {
				return 0, err
			}
			return largest(p.ctx, p.rt, p.c, time.Since(started).Seconds()/float64(p.batch))
		})
	}
	times, err := measure.InTurns(1, rounds, measure.Alone, steps...)
	for _, t := range times {
		medians = append(medians, measure.Median(t))
	}
	return medians, err
}

// settle makes the residual what it is after many steps: as many entries pass a threshold as are sent.
func (p *probe) settle(s *Reducer) error {
	if s.residual == 0 {
		return nil
	}
	interval := float64(s.n) / float64(count(s.cfg.Density, s.n))
	if s.cfg.Pattern == Oktopk { // k entries of all ranks together make it into the result
		interval *= float64(s.size)
	}
	values := make([]float32, min(s.n, randomBlock))
	measure.DrawResidual(p.rng, values, 1, interval)
	return p.repeat(s.residual, hostmem.Bytes(values), s.n*base.WordSize)
}

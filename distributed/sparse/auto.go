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
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/settled"
	"github.com/tutti-go/tutti/runtime"
)

// Auto, for [Config.Pattern], is the pattern of [Patterns] whose steps are the
// fastest here: on this communicator, with this runtime's kernels, for this length
// and density. The ranks find out together, by making steps with each on random
// numbers, and agree on a [Choice], which stays.
//
// A [Reducer] does so in the first step that is not dense by its schedule, for
// Config.Density; a package ddp when it is made, once for all buckets of about
// the same length. It takes about three seconds at most where steps take less than
// 50 ms (on devices, where eight steps are timed together, up to a dozen), and
// otherwise the time of some steps more; and memory meanwhile, of up to eleven times the
// tensor's size, about twenty with momentum, but for no more than 16,777,216 elements.
//
// Dense is the fastest where links are like memory, or most entries are to be sent.
// It is also chosen where a sparse pattern is faster by less than a twentieth. What
// counts is the time of a step: patterns that send less need more of them for the
// same accuracy.
const Auto = "auto"

// Choice is what the ranks found for [Auto].
type Choice struct {
	// Pattern is the one that is used.
	Pattern string
	// Elements and K are what was measured: of a tensor whose steps are slow only a
	// part.
	Elements, K int
	// Trials are the patterns that were measured. Those that are missing were not,
	// because time was up or they do the same as another one here.
	Trials []Trial
	// Took is how long it took.
	Took time.Duration
}

// Trial is what a step of a pattern takes, on the slowest rank: the shortest of a few;
// of those that were close to the fastest the median of steps that were made in turns,
// with its share of those in which thresholds and partitions are found anew.
type Trial struct {
	Pattern string
	Time    time.Duration
	// Estimated from steps with a part of the elements: it is far from being the
	// fastest.
	Estimated bool
}

// Limits of a measurement.
const (
	trialElements  = 1 << 24                 // most elements of a trial
	fewestElements = 1 << 16                 // fewest that a tensor whose steps are slow is cut down to
	slowTrial      = 50 * time.Millisecond   // what a slow step takes
	shortTrial     = 10 * time.Millisecond   // for so long steps are repeated, and that is not long
	fewestSteps    = 3                       // but so often at least, the first of them to warm up
	mostSteps      = 15                      // and so often at most
	probeTime      = 1500 * time.Millisecond // no pattern is begun after it
	mostFinalists  = 4                       // and dense
	fewestRounds   = 4                       // of the final, among those that are close
	mostRounds     = 128                     // of the final
	finalTime      = 600 * time.Millisecond  // no round is begun after it but the first 2*fewestRounds
	batch          = 8                       // steps that are timed together, on devices with streams
	shifts         = 1 << 12                 // gradients that random numbers make, each shifted by one element
	randomBlock    = 1 << 16                 // numbers that are drawn; the others repeat them
)

// tried are the sparse patterns in the order in which they are measured: what wins
// most often first, in case that time is up.
func tried() []string {
	return []string{TopkA, Oktopk, Gtopk, TopkAopt, TopkSA, GaussiankConcat, Gaussiank, GaussiankSA, TopkA2}
}

// decide makes the choice, and the pattern that of the configuration. It is part of
// the step: when that is undone, the next one chooses again, as it does on ranks that
// the error has kept from choosing.
func (s *Reducer) decide(ctx context.Context, dt dtype.DType) {
	choice, err := choose(ctx, s.rt, s.c, s.n, dt, s.given)
	s.check(err)
	if s.err == nil {
		s.become(choice.Pattern, choice)
		s.chose = true
	}
}

// become makes a pattern that of the configuration. Thresholds and partitions start
// anew.
func (s *Reducer) become(pattern string, choice *Choice) {
	cfg, err := s.given.with(pattern)
	s.check(err)
	s.cfg, s.choice, s.k, s.chose = cfg, choice, 0, false
	s.resetNumbers()
	s.prepare()
}

// with is c with a pattern in the place of Auto, and defaults.
func (c Config) with(pattern string) (Config, error) {
	c.Pattern = pattern
	return c.WithDefaults()
}

// chosenFor returns the configuration that Auto may have become for a state with this
// fingerprint, or the one there is.
func (s *Reducer) chosenFor(fingerprint uint64) Config {
	if s.given.Pattern == Auto {
		for _, pattern := range append(Patterns(), Auto) {
			if cfg, err := s.given.with(pattern); err == nil && cfg.fingerprint(s.n) == fingerprint {
				return cfg
			}
		}
	}
	return s.cfg
}

// choose has the ranks make the choice for n elements. It is collective.
func choose(ctx context.Context, rt runtime.Runtime, c comm.Communicator, n int, dt dtype.DType, cfg Config) (*Choice, error) {
	k := count(cfg.Density, n)
	if c.WorldSize() == 1 || 2*k >= n { // there is nothing to send, or too much
		return &Choice{Pattern: Dense, Elements: n, K: k}, nil
	}
	started := time.Now()
	cfg.Schedule = Schedule{}
	p := &probe{ctx: ctx, rt: rt, c: c, cfg: cfg, dt: dt, n: min(n, trialElements)}
	p.k = count(cfg.Density, p.n)
	p.streams = base.NewOrder(rt, c).Streams != nil
	choice, err := p.run()
	if err := errors.Join(err, p.close()); err != nil {
		return nil, fmt.Errorf("choosing a pattern: %w", err)
	}
	choice.Took = time.Since(started)
	if c.Rank() == 0 {
		slog.Info("distributed: chose a pattern", "pattern", choice.Pattern, "elements", n, "density", cfg.Density, "ranks", c.WorldSize(),
			"trials", fmt.Sprint(choice.Trials), "took", choice.Took.Round(time.Millisecond))
	}
	return choice, nil
}

// sizeClass is a class of lengths that one choice serves, a factor of the square
// root of two wide.
func sizeClass(n int) int { return int(math.Round(2 * math.Log2(float64(max(n, 1))))) }

// String is as in "topkA 1.2ms" or, of an estimate, "dense ~300ms".
func (t Trial) String() string {
	about := ""
	if t.Estimated {
		about = "~"
	}
	return fmt.Sprintf("%s %s%v", t.Pattern, about, t.Time.Round(100*time.Nanosecond))
}

// probe measures patterns. Whatever it decides by is a time that all ranks have
// agreed on, so that they decide the same.
type probe struct {
	ctx     context.Context
	rt      runtime.Runtime
	c       comm.Communicator
	cfg     Config
	dt      dtype.DType
	n, k    int
	streams bool // the host runs ahead of the device

	rng      *rand.Rand
	random   *runtime.Tensor // n + shifts elements
	gradient *runtime.Tensor // n elements
	times    *runtime.Tensor // what is agreed on
	made     int             // gradients
	spent    float64         // seconds
}

// run measures.
func (p *probe) run() (*Choice, error) {
	if err := p.allocate(); err != nil {
		return nil, err
	}
	if err := p.fit(); err != nil {
		return nil, err
	}
	trials, best, err := p.trySparse()
	if err != nil {
		return nil, err
	}
	dense, err := p.tryDense(best)
	if err != nil {
		return nil, err
	}
	trials = append(trials, dense)
	fastestFirst(trials)
	choice := &Choice{Elements: p.n, K: p.k, Trials: trials}
	choice.Pattern, err = p.final(finalistsOf(trials))
	fastestFirst(trials)
	return choice, err
}

// trySparse measures the sparse patterns, twice where there is time: those that come
// first may be slow for that, as connections are which have just been made. It also
// returns the shortest time, in seconds.
func (p *probe) trySparse() (trials []Trial, best float64, err error) {
	best = math.Inf(1)
	for _, name := range slices.Repeat(tried(), 2) {
		if p.redundant(name) || p.spent > probeTime.Seconds() {
			continue
		}
		seconds, err := p.try(name, p.n, best)
		if err != nil {
			return nil, 0, err
		}
		best = min(best, seconds)
		if i := slices.IndexFunc(trials, func(t Trial) bool { return t.Pattern == name }); i >= 0 {
			trials[i].Time = min(trials[i].Time, duration(seconds))
		} else {
			trials = append(trials, Trial{Pattern: name, Time: duration(seconds)})
		}
	}
	return trials, best, nil
}

func fastestFirst(trials []Trial) {
	slices.SortStableFunc(trials, func(a, b Trial) int { return cmp.Compare(a.Time, b.Time) })
}

// finalistsOf returns those of trials that are close to the first, up to
// mostFinalists, and dense unless it is far.
func finalistsOf(trials []Trial) []*Trial {
	var near []*Trial
	for i := range trials {
		t := &trials[i]
		if !t.Estimated && (i < mostFinalists && 3*t.Time <= 5*trials[0].Time || t.Pattern == Dense && t.Time <= 4*trials[0].Time) {
			near = append(near, t)
		}
	}
	return near
}

func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

// redundant reports whether a pattern does here what another one does: oktopk with
// few entries, and without lengths that the host waits for, as on devices with
// streams, how gaussiank sends its messages.
func (p *probe) redundant(name string) bool {
	switch name {
	case Oktopk:
		uses, _ := find(name, p.k, p.n, p.c.WorldSize())
		return uses != name
	case GaussiankConcat:
		return p.streams
	}
	return false
}

// fit cuts the tensor down to where steps are not slow. Then latencies are little
// of them, and what they take is in proportion to the length.
func (p *probe) fit() error {
	t, err := p.newTrial(tried()[0], p.n)
	if err != nil {
		return err
	}
	seconds, err := t.step()
	slow := slowTrial.Seconds()
	if err == nil && seconds > slow { // the first one connects the ranks
		seconds, err = t.step()
	}
	if seconds > slow {
		p.n = min(p.n, max(fewestElements, int(float64(p.n)*slow/seconds)))
		p.k = count(p.cfg.Density, p.n)
	}
	p.spent = 0
	return errors.Join(err, t.close())
}

// try measures a pattern on n elements, less often if it is far from the best. It
// returns the shortest of its steps without the first, which a disturbance that comes
// and goes spares: it says who is far.
func (p *probe) try(name string, n int, best float64) (float64, error) {
	t, err := p.newTrial(name, n)
	if err != nil {
		return 0, err
	}
	far := 2 * best
	if name == Dense {
		far *= 2 // one wrong choice less that matters
	}
	var times []float64
	shortest := math.Inf(1)
	for err == nil {
		var seconds float64
		seconds, err = t.step()
		times = append(times, seconds)
		shortest = min(shortest, seconds)
		slow, steps := shortest > slowTrial.Seconds(), len(times)
		enough := steps >= fewestSteps && (shortest > far || float64(steps)*shortest > shortTrial.Seconds()) || steps == mostSteps
		if enough || slow && (steps > 1 || shortest > far) {
			break
		}
	}
	return slices.Min(times[min(1, len(times)-1):]), errors.Join(err, t.close())
}

// tryDense measures the dense pattern. If steps on small parts say that it is far
// from the best, and would take long, it is not tried on the whole. (Where it would
// not, their microseconds, which the estimate has forty times, say little.)
func (p *probe) tryDense(best float64) (Trial, error) {
	result := Trial{Pattern: Dense}
	if p.n >= fewestElements {
		var parts [2]float64
		for i, part := range []int{p.n / 128, p.n / 32} {
			var err error
			if parts[i], err = p.try(Dense, part, math.Inf(1)); err != nil {
				return result, err
			}
		}
		// A line through both: 3/128 of the length are between them, 124/128 behind.
		whole := parts[1] + max(0, parts[1]-parts[0])*124/3
		if whole > max(3*best, shortTrial.Seconds()) {
			result.Time, result.Estimated = duration(whole), true
			return result, nil
		}
	}
	seconds, err := p.try(Dense, p.n, best)
	result.Time = duration(seconds)
	return result, err
}

// racer is a finalist.
type racer struct {
	*trial
	result *Trial
	times  []float64 // of its rounds, in seconds
	anew   float64   // of the step in which it finds thresholds and partitions anew
	every  float64   // how often such steps come
}

// seconds is what a step takes: the median, the lower one of an even number, as
// what disturbs makes steps longer.
func (r *racer) seconds() float64 {
	usual := slices.Sorted(slices.Values(r.times))[(len(r.times)-1)/2]
	return usual + max(0, r.anew-usual)/r.every
}

// final measures finalists once more, in turns, so that what disturbs one disturbs
// the others, too, and returns the fastest, or dense if it is nearly as fast. The
// farther one is behind, the earlier it is out.
func (p *probe) final(finalists []*Trial) (pattern string, err error) {
	if len(finalists) == 1 { // it has won
		return finalists[0].Pattern, nil
	}
	var all []*racer
	defer func() {
		for _, r := range all {
			err = errors.Join(err, r.close())
		}
	}()
	for _, f := range finalists {
		t, err := p.newTrial(f.Pattern, p.n)
		if err != nil {
			return "", err
		}
		every := float64(t.sparse.cfg.tuning.ThresholdInterval)
		if p.streams { // it is one of a batch
			every /= batch
		}
		all = append(all, &racer{trial: t, result: f, every: every})
	}
	racing, began := slices.Clone(all), p.spent
	const before = 2 // a round to warm up, and one in which all is found anew
	for round := 0; round < before+fewestRounds || len(racing) > 1 && round < before+mostRounds; round++ {
		used := p.spent - began
		if round >= before+fewestRounds && used > probeTime.Seconds() || round >= before+2*fewestRounds && used > finalTime.Seconds() {
			break
		}
		for i := range racing {
			r := racing[(i+round)%len(racing)]
			if round == 1 {
				r.findAnew()
			}
			seconds, err := r.step()
			switch {
			case err != nil:
				return "", err
			case round == 1:
				r.anew = seconds
			case round > 1:
				r.times = append(r.times, seconds)
			}
		}
		racing = stillRacing(racing, round+1-before)
	}
	for _, r := range all {
		r.result.Time = duration(r.seconds())
	}
	return winner(racing), nil
}

// stillRacing returns those that go on after so many rounds that count: after 4, 8, 16
// and so on all that are within 50, 25, 12 % and so on of the fastest, as what rounds
// tell apart gets finer. (It is successive halving by a margin; Karnin, Koren and
// Somekh, "Almost Optimal Exploration in Multi-Armed Bandits", ICML 2013.)
func stillRacing(racing []*racer, rounds int) []*racer {
	if rounds < fewestRounds || rounds&(rounds-1) != 0 {
		return racing
	}
	most := fastest(racing).seconds() * (1 + 2/float64(rounds))
	return slices.DeleteFunc(racing, func(r *racer) bool { return r.seconds() > most })
}

func fastest(racing []*racer) *racer {
	return slices.MinFunc(racing, func(a, b *racer) int { return cmp.Compare(a.seconds(), b.seconds()) })
}

// winner is the fastest, or dense if that is faster by less than a twentieth.
func winner(racing []*racer) string {
	first := fastest(racing)
	for _, r := range racing {
		if r.result.Pattern == Dense && 20*r.seconds() <= 21*first.seconds() {
			return Dense
		}
	}
	return first.result.Pattern
}

// allocate makes the memory and the random numbers.
func (p *probe) allocate() error {
	var err error
	if p.random, err = runtime.New(p.rt, p.dt, p.n+shifts); err != nil {
		return err
	}
	if p.gradient, err = runtime.New(p.rt, p.dt, p.n); err != nil {
		return err
	}
	if p.times, err = runtime.New(p.rt, dtype.F64, 1); err != nil {
		return err
	}
	drawn := min(p.random.Len(), randomBlock)
	values, raw := make([]float32, drawn), make([]byte, drawn*p.dt.Size())
	p.rng = rand.New(rand.NewPCG(uint64(p.c.Rank()), uint64(p.n)))
	for i := range values {
		values[i] = float32(p.rng.NormFloat64())
	}
	if err := dtype.FromFloat32(raw, p.dt, values); err != nil {
		return err
	}
	ptr, err := p.random.Ptr()
	if err != nil {
		return err
	}
	return p.repeat(ptr, raw, p.random.Bytes())
}

// repeat fills memory with values, again and again.
func (p *probe) repeat(ptr uintptr, values []byte, bytes int) error {
	done := min(len(values), bytes)
	if err := p.rt.CopyIn(ptr, values[:done]); err != nil {
		return err
	}
	for done < bytes {
		more := min(done, bytes-done)
		if err := p.rt.Copy(ptr+uintptr(done), ptr, more); err != nil {
			return err
		}
		done += more
	}
	return nil
}

// close gives the memory back.
func (p *probe) close() error {
	var errs []error
	for _, t := range []*runtime.Tensor{p.times, p.gradient, p.random} {
		if t != nil {
			errs = append(errs, t.Free())
		}
	}
	return errors.Join(errs...)
}

// trial is a pattern that is measured.
type trial struct {
	*probe
	name     string
	sparse   *Reducer
	gradient *runtime.Tensor
	alone    float64 // seconds that a batch of gradients takes, the least so far
}

// newTrial is a pattern on so many elements.
func (p *probe) newTrial(name string, n int) (*trial, error) {
	cfg := p.cfg
	cfg.Pattern = name
	view, err := p.gradient.Slice(0, 0, n)
	if err != nil {
		return nil, err
	}
	s, err := New(p.rt, p.c, n, cfg)
	if err != nil {
		return nil, errors.Join(err, view.Free())
	}
	t := &trial{probe: p, name: name, sparse: s, gradient: view, alone: math.Inf(1)}
	if err := t.settle(); err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

// settle makes the residual what it is after many steps: then as many entries grow
// beyond a threshold in a step as are sent. (In gtopk's tree ranks differ in what is
// sent. It picks exactly, so it matters little.)
func (t *trial) settle() error {
	s := t.sparse
	if s.residual == 0 || s.n == 0 {
		return nil
	}
	interval := float64(s.n) / float64(count(s.cfg.Density, s.n))
	switch t.name {
	case TopkA2, Oktopk: // k entries of all ranks together make it into the result
		interval *= float64(s.size)
	}
	deviation := 1.0
	if norm := s.cfg.ClipNorm; norm > 0 {
		if s.cfg.Clip == ClipLocal {
			norm /= math.Sqrt(float64(s.size))
		}
		deviation = min(1, norm/math.Sqrt(float64(s.n)))
	}
	values := make([]float32, min(s.n, randomBlock))
	settled.Draw(t.rng, values, deviation, interval)
	return t.repeat(s.residual, hostmem.Bytes(values), s.n*base.WordSize)
}

// findAnew has the next step find thresholds and partitions anew, as a step does from
// time to time: when they are old enough.
func (t *trial) findAnew() {
	s := t.sparse
	if _, kept := s.selector.(reused); kept {
		s.setInt(numState+1, int32(s.cfg.tuning.ThresholdInterval))
	}
	s.past.age, s.past.steps = s.cfg.tuning.ThresholdInterval, 0
}

func (t *trial) close() error { return errors.Join(t.sparse.Close(), t.gradient.Free()) }

// step makes a step and returns what it took, on the slowest rank; where the host
// runs ahead, the mean of a batch, less what its gradients take. A disturbance of these
// must not make steps look short.
func (t *trial) step() (float64, error) {
	if t.streams {
		alone, err := t.timeBatch(t.refresh)
		if err != nil {
			return 0, err
		}
		t.alone = min(t.alone, alone)
		all, err := t.timeBatch(func() error { return errors.Join(t.refresh(), t.sparse.AllReduce(t.ctx, t.gradient)) })
		return max(all-t.alone, 0) / batch, err
	}
	if err := t.refresh(); err != nil {
		return 0, err
	}
	return t.time(func() error { return t.sparse.AllReduce(t.ctx, t.gradient) })
}

func (t *trial) timeBatch(call func() error) (float64, error) {
	return t.time(func() error {
		for range batch {
			if err := call(); err != nil {
				return err
			}
		}
		return nil
	})
}

// time returns what a call takes until its work is done, on the slowest rank.
func (t *trial) time(call func() error) (float64, error) {
	if err := t.order().HostAfterAll(t.ctx); err != nil {
		return 0, err
	}
	if err := t.c.Barrier(t.ctx); err != nil {
		return 0, err
	}
	started := time.Now()
	if err := call(); err != nil {
		return 0, err
	}
	if err := t.order().HostAfterAll(t.ctx); err != nil {
		return 0, err
	}
	seconds := []float64{time.Since(started).Seconds()}
	if err := runtime.CopyIn(t.times, seconds); err != nil {
		return 0, err
	}
	if err := distributed.AllReduce(t.ctx, t.c, t.times, comm.Max); err != nil {
		return 0, err
	}
	if err := t.c.Sync(t.ctx); err != nil {
		return 0, err
	}
	err := runtime.CopyOut(seconds, t.times)
	t.spent += seconds[0]
	return seconds[0], err
}

func (t *trial) order() *base.Order { return &t.sparse.engine.order }

// refresh makes the gradient of the next step.
func (t *trial) refresh() error {
	from, err := t.random.Ptr()
	if err != nil {
		return err
	}
	to, err := t.gradient.Ptr()
	if err != nil {
		return err
	}
	from += uintptr(t.made % shifts * t.dt.Size())
	t.made++
	return t.rt.Copy(to, from, t.gradient.Bytes())
}

package distributedtest

import (
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// RunSelector runs what holds with a [sparse.Selector] before each exchange as subtests of t, for each world
// size of b: the same bits on all ranks, and nothing lost, with families of gradients, of all types, with
// schedules, clipping, in place and with a gradient that is not finite; and oktopk's bound.
func RunSelector(t *testing.T, b commtest.Backend, selector sparse.Selector, opts ...Option) {
	t.Helper()
	cases := slices.DeleteFunc(patternCases(), func(c testCase) bool {
		// Without a residual, equal gradients need not have equal results, as Step differs.
		return strings.HasPrefix(c.name, sparse.Dense) || c.name == sparse.Auto || strings.HasSuffix(c.name, "/NoFeedback")
	})
	runCases(t, b, cases, append(opts, func(s *suite) { s.selector = selector }))
}

// patternCases are the cases of every pattern.
func patternCases() []testCase {
	bodies := []struct {
		name   string
		body   func(r *rank, pattern string) error
		sparse bool // also for the dense pattern
	}{
		{name: "Conservation", body: testConservation},
		{name: "Large", body: testLarge},
		{name: "NoFeedback", body: testNoFeedback},
		{name: "FullDensity", body: testFullDensity},
		{name: "HalfTypes", body: testHalfTypes},
		{name: "Special", body: testSpecial},
		{name: "Schedule", body: testSchedule},
		{name: "Clipping", body: testClipping, sparse: true},
		{name: "InPlace", body: testInPlace},
		{name: "Values", body: testValues, sparse: true},
	}
	var cases []testCase
	for _, pattern := range sparse.Patterns() {
		for _, b := range bodies {
			cases = append(cases, testCase{name: pattern + "/" + b.name, sparse: b.sparse || pattern != sparse.Dense,
				body: func(r *rank) error { return b.body(r, pattern) }})
		}
	}
	return append(cases, testCase{name: "oktopk/Volume", sparse: true, body: testVolume},
		testCase{name: "auto", sparse: true, body: testAuto})
}

// run is a Sparse under test, with what the checks need to know about it.
type run struct {
	*rank
	label  string
	cfg    sparse.Config
	codec  runtime.Codec // of cfg
	sparse reducer
	meter  *comm.Meter
	t      *runtime.Tensor
	result []float32
	stats  sparse.Stats // of the last step
	sums   []float64    // scratch

	// The residual is that of t's elements from here on, and an element of it
	// stands for so many ranks' gradients.
	from   int
	weight float32

	notFinite bool // there was a NaN or an infinity, sums are not conserved
}

// newRun makes a Sparse for n elements of type dt.
func (r *rank) newRun(label string, n int, dt dtype.DType, cfg sparse.Config) (*run, error) {
	label = fmt.Sprintf("%s, %v, n=%d, density %v, values %q", label, dt, n, cfg.Density, cfg.Values)
	cfg.Selector = r.selector
	t, err := r.tensor(dt, make([]float32, n))
	if err != nil {
		return nil, err
	}
	meter := comm.NewMeter(r.c)
	s, err := sparse.New(r.rt, meter, n, cfg)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", label, err)
	}
	return &run{rank: r, label: label, cfg: cfg, codec: codecs[cfg.Values], sparse: s, meter: meter, t: t, weight: 1}, nil
}

// codecs are what values travel as.
var codecs = map[string]runtime.Codec{sparse.Lossless: runtime.CodecF32, sparse.BF16: runtime.CodecBF16, sparse.F16: runtime.CodecF16,
	sparse.FP8: runtime.CodecFP8, sparse.I8: runtime.CodecI8, sparse.I4: runtime.CodecI4, sparse.I2: runtime.CodecI2, sparse.Bit: runtime.CodecSign}

// close ends a run and adds its label to err.
func (u *run) close(err error) error {
	if err != nil {
		err = fmt.Errorf("%s: %w", u.label, err)
	}
	return errors.Join(err, u.sparse.Close())
}

// reduce runs one step on a gradient and reads the result.
func (u *run) reduce(gradient []float32) error {
	if err := u.write(u.t, gradient); err != nil {
		return err
	}
	if err := u.sparse.AllReduce(u.ctx, u.t); err != nil {
		return err
	}
	var err error
	u.result, err = u.read(u.t)
	return err
}

// residual returns what this rank's residual holds of each element, zeros if the
// pattern has none.
func (u *run) residual() ([]float32, error) {
	t, err := u.sparse.Residual()
	if u.mayBeDense() && errors.Is(err, comm.ErrUnsupported) {
		return make([]float32, u.t.Len()), nil
	}
	if err != nil {
		return nil, err
	}
	values, err := u.read(t)
	if err != nil || len(values) == u.t.Len() && u.weight == 1 {
		return values, err
	}
	all := make([]float32, u.t.Len())
	for i, v := range values {
		all[u.from+i] = u.weight * v
	}
	return all, nil
}

// mayBeDense reports whether the backend may add up, without a residual.
func (u *run) mayBeDense() bool {
	return u.cfg.Pattern == sparse.Dense && (u.cfg.Values == "" || u.cfg.Values == sparse.F32) || u.cfg.Pattern == sparse.Auto
}

// step runs one step and checks everything that holds for finite gradients:
// same bits everywhere, conservation (with error feedback) and statistics.
func (u *run) step(gradient []float32) error {
	before, err := u.residual()
	if err != nil {
		return err
	}
	sent := u.meter.Totals()
	if u.t.DType() != dtype.F32 { // what counts is the gradient as its type holds it
		if err := u.write(u.t, gradient); err != nil {
			return err
		}
		if gradient, err = u.read(u.t); err != nil {
			return err
		}
	}
	if err := u.reduce(gradient); err != nil {
		return err
	}
	total := u.meter.Totals()
	if err := u.sameBits(); err != nil {
		return err
	}
	stats, err := u.sparse.Stats(u.ctx)
	if err != nil {
		return err
	}
	chose := u.stats.Choice == nil && stats.Choice != nil // what that sent does not count
	if got, want := stats.SentElements+stats.InnerElements, total.SentElements-sent.SentElements; got != want && !chose {
		return fmt.Errorf("stats say %d elements were sent, a meter counted %d", got, want)
	}
	if got, want := stats.SentBytes+stats.InnerBytes, total.SentBytes-sent.SentBytes; got != want && !chose {
		return fmt.Errorf("stats say %d bytes were sent, a meter counted %d", got, want)
	}
	u.stats = stats
	if err := u.inBudget(); err != nil {
		return err
	}
	if u.cfg.NoErrorFeedback || u.notFinite {
		return nil
	}
	return u.conserved(before, gradient)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sameBits checks that all ranks have the same result.
func (u *run) sameBits() error {
	raw, err := u.bytes(u.t)
	if err != nil {
		return err
	}
	sums := make([]float64, u.size)
	sums[u.rank.rank] = float64(crc32.Checksum(raw, castagnoli))
	if err := u.sum(sums); err != nil {
		return err
	}
	for peer, sum := range sums {
		if sum != sums[0] {
			return fmt.Errorf("result of rank %d differs from that of rank 0", peer)
		}
	}
	return nil
}

// conserved checks for every index that what the ranks put in (gradient and
// old residual) is what came out (P times the result, and the new residuals).
func (u *run) conserved(before, gradient []float32) error {
	after, err := u.residual()
	if err != nil {
		return err
	}
	n := len(gradient)
	// One exchange for both: the difference, and the magnitude that rounding
	// errors are measured against.
	if len(u.sums) != 2*n {
		u.sums = make([]float64, 2*n)
	}
	sums := u.sums
	for i, g := range gradient {
		in := float64(g) + float64(before[i])
		sums[i] = in - float64(u.result[i]) - float64(after[i])
		sums[n+i] = math.Abs(float64(g)) + math.Abs(float64(before[i]))
	}
	if err := u.sum(sums); err != nil {
		return err
	}
	// Float32 sums of 2P numbers, divided and multiplied by P; then rounded to
	// the type of the tensor. Subnormal numbers have an absolute error instead,
	// and where each of P shares is divided before they are added up, each has
	// that of a division, multiplied by P.
	relative := float64(2*u.size+4) * 0x1p-24
	smallest := float64((u.size+2)*(u.size+2)) * 0x1p-149
	rounded := 1.0
	if u.mayBeDense() {
		rounded = halfRoundings(u.size) // the backend adds up
	}
	switch u.t.DType() {
	case dtype.BF16:
		relative += rounded * 0x1p-8
	case dtype.F16:
		relative += rounded * 0x1p-11
		smallest += float64(u.size) * 0x1p-24
	}
	switch u.cfg.Values {
	case sparse.I2, sparse.Bit: // what an element loses is as large as the mean of others may be
		smallest += relative * slices.Max(append(sums[n:], 0))
	case "", sparse.F32:
	default: // a code may be twice the number
		relative *= 2
	}
	for i, diff := range sums[:n] {
		if tolerance := sums[n+i]*relative + smallest; !(math.Abs(diff) <= tolerance) {
			return fmt.Errorf("step %d: %v got lost at index %d of %d, tolerance %v (result %v)",
				u.stats.Step, diff, i, n, tolerance, u.result[i])
		}
	}
	return nil
}

// halfRoundings is how often a backend may round in a sum of two-byte numbers
// over size ranks: each input, and each sum on its way.
func halfRoundings(size int) float64 { return float64(size + 1) }

// often is a configuration in which thresholds and partitions are computed anew,
// and reused, within a few steps.
func often(pattern string, density float64) sparse.Config {
	return sparse.Config{Pattern: pattern, Density: density}.Tuned(tuning.Tuning{ThresholdInterval: 3, RebalanceInterval: 4})
}

// sequence runs steps of a family of gradients.
func (r *rank) sequence(k family, n, steps int, dt dtype.DType, cfg sparse.Config) error {
	u, err := r.newRun(k.name, n, dt, cfg)
	if err != nil {
		return err
	}
	for step := range steps {
		if err := u.step(r.gradient(k, n, r.rank, r.size, step)); err != nil {
			return u.close(err)
		}
	}
	return errors.Join(u.close(nil), r.free())
}

// testConservation runs all families of gradients through small tensors with enough
// elements for every part of a pattern, and the first through tensors of fewer, or none.
func testConservation(r *rank, pattern string) error {
	shapes := []struct {
		n       int
		density float64
	}{{0, 0.5}, {1, 1}, {3, 0.4}, {64, 0.05}, {1000, 0.01}, {1000, 0.25}}
	steps := 6
	if r.extended {
		steps = 20
	}
	for i, k := range families {
		for _, s := range shapes {
			if i > 0 && s.n < 64 && !r.extended {
				continue
			}
			if err := r.sequence(k, s.n, steps, dtype.F32, often(pattern, s.density)); err != nil {
				return err
			}
		}
	}
	return nil
}

// testAuto runs some families through what was chosen, which may be any pattern.
func testAuto(r *rank) error {
	for i, k := range families[:3] {
		for _, n := range [][]int{{0, 3, 1000, r.large()}, {1000}}[min(i, 1)] {
			if err := r.sequence(k, n, 4, dtype.F32, often(sparse.Auto, 0.02)); err != nil {
				return err
			}
		}
	}
	return r.sequence(families[0], 1000, 4, dtype.F16, often(sparse.Auto, 0.1))
}

// large is the length of tensors that every part of a pattern has work with.
func (s *suite) large() int {
	if testing.Short() {
		return 20_000
	}
	return 100_000
}

// testLarge runs some families through large tensors.
func testLarge(r *rank, pattern string) error {
	steps := 3
	if r.extended {
		steps = 6
	}
	for _, k := range families {
		if r.extended || slices.Contains([]string{"normal", "own cluster"}, k.name) {
			if err := r.sequence(k, r.large(), steps, dtype.F32, often(pattern, 0.01)); err != nil {
				return err
			}
		}
	}
	return nil
}

// testNoFeedback checks that without error feedback nothing is carried over:
// two steps with the same gradient have the same result, which holds only
// averages of entries of that gradient.
func testNoFeedback(r *rank, pattern string) error {
	cfg := often(pattern, 0.1)
	cfg.NoErrorFeedback = true
	cfg = cfg.Tuned(tuning.Tuning{ThresholdInterval: 1, RebalanceInterval: 4}) // a corrected threshold would be state
	u, err := r.newRun("no feedback", 2000, dtype.F32, cfg)
	if err != nil {
		return err
	}
	g := r.gradient(families[0], 2000, r.rank, r.size, 0)
	if err := u.step(g); err != nil {
		return u.close(err)
	}
	first := slices.Clone(u.result)
	// Partitions are balanced in the first step only, and which entries are cut
	// depends on partitions: compare without cuts.
	if err := u.step(g); err != nil {
		return u.close(err)
	}
	if pattern != sparse.Oktopk && !slices.Equal(first, u.result) {
		return u.close(errors.New("the second step with the same gradient has another result"))
	}
	return u.close(nil)
}

// testFullDensity compares every pattern at density 1 with a dense average in
// float64.
func testFullDensity(r *rank, pattern string) error {
	for _, n := range []int{1, 5, 1000} {
		u, err := r.newRun("full", n, dtype.F32, often(pattern, 1))
		if err != nil {
			return err
		}
		for step := range 3 {
			if err := u.step(r.gradient(families[0], n, r.rank, r.size, step)); err != nil {
				return u.close(err)
			}
			want, scale := r.average(families[0], n, step)
			for i, got := range u.result {
				if diff := math.Abs(float64(got) - want[i]); diff > scale[i]*1e-6 {
					return u.close(fmt.Errorf("step %d: result %v at index %d, want %v", step, got, i, want[i]))
				}
			}
		}
		if err := u.close(nil); err != nil {
			return err
		}
	}
	return nil
}

// average returns the dense average of all ranks' gradients in float64, and
// the mean of their magnitudes.
func (r *rank) average(k family, n, step int) (mean, magnitude []float64) {
	mean, magnitude = make([]float64, n), make([]float64, n)
	for peer := range r.size {
		for i, g := range r.gradient(k, n, peer, r.size, step) {
			mean[i] += float64(g) / float64(r.size)
			magnitude[i] += math.Abs(float64(g)) / float64(r.size)
		}
	}
	return mean, magnitude
}

// testHalfTypes runs gradients of 16 bits.
func testHalfTypes(r *rank, pattern string) error {
	for _, dt := range []dtype.DType{dtype.F16, dtype.BF16} {
		if err := r.sequence(families[0], 3000, 4, dt, often(pattern, 0.1)); err != nil {
			return err
		}
	}
	return nil
}

// testSpecial puts a NaN on one rank and an infinity on another: every rank
// sees them in the same step, at their place and nowhere else, and later steps
// are clean again.
func testSpecial(r *rank, pattern string) error { return special(r, often(pattern, 0.1)) }

func special(r *rank, cfg sparse.Config) error {
	for _, policy := range []sparse.NonFinitePolicy{sparse.PassNonFinite, sparse.SkipNonFinite} {
		if r.selector != nil && policy == sparse.PassNonFinite {
			continue // entries wait until they are selected
		}
		cfg.NonFinite = policy
		if err := specialBy(r, cfg); err != nil {
			return err
		}
	}
	return nil
}

func specialBy(r *rank, cfg sparse.Config) error {
	const n, nan, inf = 3000, 17, 2900
	policy := cfg.NonFinite
	// Scaled codes have a NaN for all that is not finite, and bins no code of their own: all that
	// share a table or a magnitude are NaN, and what of it is not sent is so in later steps.
	scaled := slices.Contains([]string{sparse.FP8, sparse.I8, sparse.I4}, cfg.Values)
	spreads := slices.Contains([]string{sparse.I2, sparse.Bit}, cfg.Values) && policy == sparse.PassNonFinite
	u, err := r.newRun("special", n, dtype.F32, cfg)
	if err != nil {
		return err
	}
	for step := range 6 {
		g := r.gradient(families[0], n, r.rank, r.size, step)
		special := step%3 == 1
		if special && r.rank == 0 {
			g[nan] = float32(math.NaN())
		}
		if special && r.rank == r.size-1 {
			g[inf] = float32(math.Inf(-1))
		}
		before, err := u.residual()
		if err != nil {
			return u.close(err)
		}
		if err := u.reduce(g); err != nil {
			return u.close(err)
		}
		if err := u.sameBits(); err != nil {
			return u.close(err)
		}
		stats, err := u.sparse.Stats(u.ctx)
		if err != nil {
			return u.close(err)
		}
		drops := special && policy == sparse.SkipNonFinite
		if stats.Skipped != drops {
			return u.close(fmt.Errorf("step %d: Skipped is %v, want %v", step, stats.Skipped, drops))
		}
		if spreads && special {
			if !slices.ContainsFunc(u.result, func(v float32) bool { return v != v }) {
				return u.close(fmt.Errorf("step %d has no NaN", step))
			}
			return u.close(nil)
		}
		for i, v := range u.result {
			x := float64(v)
			ok := !math.IsNaN(x) && !math.IsInf(x, 0)
			switch {
			case drops:
				ok = v == 0
			case special && i == nan:
				ok = math.IsNaN(x)
			case special && i == inf:
				ok = math.IsInf(x, -1) || scaled && math.IsNaN(x)
			}
			if !ok {
				return u.close(fmt.Errorf("step %d: result %v at index %d", step, v, i))
			}
		}
		after, err := u.residual()
		if err != nil {
			return u.close(err)
		}
		for i, v := range after {
			if drops && math.Float32bits(v) != math.Float32bits(before[i]) {
				return u.close(fmt.Errorf("step %d was skippedLast, but the residual at %d is %v, and was %v", step, i, v, before[i]))
			}
		}
	}
	return u.close(nil)
}

// testValues checks what holds for every pattern, as what values soever they travel: with gradients that are hard to
// round, of all types, with a NaN and an infinity, over a warm-up, and in place.
func testValues(r *rank, pattern string) error {
	hard := []string{"normal", "own cluster", "zero", "ties", "canceling", "subnormal", "huge", "one sign"}
	for _, values := range sparse.Values()[1:] {
		cfg := often(pattern, 0.1)
		cfg.Values = values
		for _, k := range families {
			if !slices.Contains(hard, k.name) {
				continue
			}
			if err := r.sequence(k, 700, 3, dtype.F32, cfg); err != nil {
				return err
			}
		}
		for i, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
			if err := r.sequence(families[0], []int{9000, 3, 600}[i], 3, dt, cfg); err != nil {
				return err
			}
		}
		if r.size > 3 && !r.extended {
			continue
		}
		if err := special(r, cfg); err != nil {
			return err
		}
		cfg.Density = 0.01
		if err := r.schedule(cfg); err != nil {
			return err
		}
		if pattern != sparse.Dense {
			if err := r.inPlace(cfg, 1009, families[0]); err != nil {
				return fmt.Errorf("in place, values %s: %w", values, err)
			}
		}
	}
	return nil
}

// testSchedule checks warm-up steps, densities by epoch, and an epoch of
// density 0.
func testSchedule(r *rank, pattern string) error { return r.schedule(often(pattern, 0.01)) }

func (r *rank) schedule(cfg sparse.Config) error {
	const n = 2000
	pattern := cfg.Pattern
	cfg.Schedule = sparse.Schedule{WarmupSteps: 2, Densities: []float64{0.25, 0}, StepsPerEpoch: 2}
	u, err := r.newRun("schedule", n, dtype.F32, cfg)
	if err != nil {
		return err
	}
	wantK := []int{n, n, 500, 500, 0, 0, 20, 20}
	for step, k := range wantK {
		if err := u.step(r.gradient(families[0], n, r.rank, r.size, step)); err != nil {
			return u.close(err)
		}
		stats := u.stats
		if pattern == sparse.Dense {
			k = n
		}
		if stats.Step != step || stats.K != k || stats.Dense != (step < 2 || pattern == sparse.Dense) {
			return u.close(fmt.Errorf("step %d: stats %+v, want k %d", step, stats, k))
		}
		if k == 0 && stats.SentElements != 0 {
			return u.close(fmt.Errorf("step %d sent %d elements at density 0", step, stats.SentElements))
		}
	}
	return u.close(nil)
}

// testClipping checks the norm of what goes into result and residual.
func testClipping(r *rank, pattern string) error {
	for _, mode := range []sparse.ClipMode{sparse.ClipLocal, sparse.ClipGlobal} {
		for _, dt := range []dtype.DType{dtype.F32, dtype.BF16} {
			if pattern == sparse.Dense && dt == dtype.BF16 {
				continue // there, clipped gradients are rounded before they are summed
			}
			cfg := often(pattern, 0.1)
			cfg.ClipNorm, cfg.Clip = 0.5, mode
			u, err := r.newRun(fmt.Sprintf("clip mode %d", mode), 2000, dt, cfg)
			if err != nil {
				return err
			}
			if err := u.close(u.clip()); err != nil {
				return err
			}
		}
	}
	return nil
}

// clip runs one step and checks that the gradient counts as clipped.
func (u *run) clip() error {
	n := u.t.Len()
	// Rank 0's gradient is small, so that it is scaled only with the others.
	g := u.gradient(families[0], n, u.rank.rank, u.size, 0)
	if u.rank.rank == 0 {
		for i := range g {
			g[i] *= 1e-4
		}
	}
	if err := u.write(u.t, g); err != nil {
		return err
	}
	g, err := u.read(u.t)
	if err != nil {
		return err
	}
	norms := make([]float64, u.size)
	for _, x := range g {
		norms[u.rank.rank] += float64(x) * float64(x)
	}
	factor := min(1, u.cfg.ClipNorm/math.Sqrt(float64(u.size)*norms[u.rank.rank]))
	if u.cfg.Clip == sparse.ClipGlobal {
		if err := u.sum(norms); err != nil {
			return err
		}
		mean := 0.0
		for _, square := range norms {
			mean += square / float64(u.size)
		}
		factor = min(1, u.cfg.ClipNorm/math.Sqrt(mean))
	}
	if err := u.reduce(g); err != nil {
		return err
	}
	for i := range g {
		g[i] = float32(float64(g[i]) * factor)
	}
	return u.conserved(make([]float32, n), g)
}

// testVolume runs oktopk with various sizes of k through all families of
// gradients; every step is checked against its bound.
func testVolume(r *rank) error {
	shapes := []struct {
		n       int
		density float64
	}{{300, 0.01}, {3000, 0.02}, {20_000, 0.1}, {20_000, 0.01}}
	if testing.Short() {
		shapes = shapes[:2]
	}
	for i, k := range families {
		for j, s := range shapes {
			if (i+j)%2 > 0 && !r.extended { // each family has two shapes, each shape half of the families
				continue
			}
			if err := r.sequence(k, s.n, 7, dtype.F32, often(sparse.Oktopk, s.density)); err != nil {
				return err
			}
		}
	}
	return nil
}
